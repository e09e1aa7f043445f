"""Sequential temperature scaling lowers the calibration error of overconfident logits."""

import torch

from drafter_svc.training.calibrate import expected_calibration_error, fit


def overconfident(num_blocks: int = 20_000, block_size: int = 3):
    """Blocks whose true logit is the reported one divided by 2.5."""
    torch.manual_seed(0)
    logits = torch.randn(num_blocks, block_size) * 4 + 1
    hits = torch.rand(num_blocks, block_size) < (logits / 2.5).sigmoid()
    accepted = hits.long().cumprod(-1).sum(-1)
    return logits, accepted, torch.full((num_blocks,), block_size)


def test_fit_finds_the_temperature_and_lowers_the_error() -> None:
    found = fit(*overconfident())
    for k in range(3):
        assert found.ece_before[k] > 0.05
        assert found.ece_after[k] < found.ece_before[k] / 3
    assert all(1.9 < temperature < 3.3 for temperature in found.temperatures)


def test_positions_past_the_end_are_left_out() -> None:
    logits, accepted, num_valid = overconfident(2000)
    cut = num_valid.clone()
    cut[:500] = 1
    found = fit(logits, torch.minimum(accepted, cut), cut)
    assert found.counts == [2000, 1500, 1500]
    kept = fit(logits[500:], accepted[500:], num_valid[500:])
    # Position 2 is judged on the same blocks, so its error before scaling is the same.
    assert abs(found.ece_before[1] - kept.ece_before[1]) < 1e-9


def test_calibration_error_of_a_constant_forecast() -> None:
    happened = torch.tensor([True, True, False, False])
    assert expected_calibration_error(torch.full((4,), 0.5), happened) == 0.0
    assert abs(expected_calibration_error(torch.full((4,), 0.9), happened) - 0.4) < 1e-6
