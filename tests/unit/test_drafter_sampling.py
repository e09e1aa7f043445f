"""drafter_svc/draft_sampling.py: what is sent was sampled from; coupled drafts share the noise."""

import numpy as np
import pytest
import torch
from scipy import stats

from common.noise import TARGET, exponential, to_int64
from drafter_svc.batcher import GREEDY, DraftMode, Sampling
from drafter_svc.draft_sampling import BlockSampler

CPU = torch.device("cpu")


def same(ids: torch.Tensor) -> torch.Tensor:
    return ids


def logits(rows: int, vocab: int = 24, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 6), (0.6, 24), (1.7, 3)])
def test_tokens_follow_exactly_the_distribution_that_is_sent(
    temperature: float, top_k: int
) -> None:
    num, row = 20_000, logits(1)
    wishes = [Sampling(DraftMode.SAMPLED, temperature, seed, top_k) for seed in range(num)]
    sampler = BlockSampler(wishes, [5] * num, 3, same, CPU)
    tokens = sampler.pick(row.expand(num, -1), 0).numpy()
    candidates = sampler.candidates()
    ids, probs = candidates[0]
    assert ids.shape == probs.shape == (1, top_k)
    truncated = (row[0] / temperature).topk(top_k)
    np.testing.assert_array_equal(ids[0], truncated.indices)
    np.testing.assert_allclose(probs[0], truncated.values.softmax(0), rtol=1e-5)
    counts = [(tokens == token).sum() for token in ids[0]]
    assert sum(counts) == num  # nothing outside the candidates
    expected = probs[0].astype(np.float64)
    assert stats.chisquare(counts, num * expected / expected.sum()).pvalue > 1e-3


def test_every_row_keeps_its_own_top_k_and_sums_to_one() -> None:
    wishes = [
        Sampling(DraftMode.SAMPLED, 1.0, 1, 2),
        GREEDY,
        Sampling(DraftMode.SAMPLED, 0.5, 2, 7),
        Sampling(DraftMode.COUPLED, 1.0, 3, 5),
        Sampling(DraftMode.SAMPLED, 1.0, 4, 0),  # the drafter's default: 64, here all 24
    ]
    sampler, rows = BlockSampler(wishes, [3, 4, 5, 6, 7], 3, same, CPU), logits(5)
    picked = [sampler.pick(rows, place) for place in range(3)]
    candidates = sampler.candidates()
    assert {row: c[0].shape for row, c in candidates.items()} == {0: (3, 2), 2: (3, 7), 4: (3, 24)}
    for row, (ids, probs) in candidates.items():
        np.testing.assert_allclose(probs.sum(1), 1.0, atol=1e-6)
        for place in range(3):
            assert picked[place][row] in ids[place]
    assert all(int(tokens[1]) == int(rows[1].argmax()) for tokens in picked)


def test_a_coupled_draft_is_the_verifiers_own_choice_when_both_agree_on_the_distribution() -> None:
    num, vocab, anchor = 300, 24, 41
    row = logits(num, vocab)
    wishes = [Sampling(DraftMode.COUPLED, 0.8, seed + 2**63, vocab) for seed in range(num)]
    sampler = BlockSampler(wishes, [anchor] * num, 3, same, CPU)
    seeds = torch.tensor([to_int64(seed + 2**63) for seed in range(num)])
    for place in range(2):
        position = torch.full((num,), anchor + 1 + place)  # of the token being chosen
        race = exponential(seeds, position, TARGET, torch.arange(vocab))
        wanted = ((row / 0.8).softmax(-1) / race).argmax(-1)
        assert torch.equal(sampler.pick(row, place), wanted)
    assert sampler.candidates() == {}


def test_a_draft_does_not_depend_on_its_neighbours() -> None:
    wishes = [
        Sampling(mode, 1.0, seed, 4 + seed)
        for seed, mode in enumerate([DraftMode.SAMPLED, DraftMode.COUPLED, DraftMode.GREEDY] * 3)
    ]
    rows = logits(len(wishes))
    together = BlockSampler(wishes, range(len(wishes)), 3, same, CPU).pick(rows, 1)
    for i, wish in enumerate(wishes):
        assert BlockSampler([wish], [i], 3, same, CPU).pick(rows[i : i + 1], 1) == together[i]


def test_draft_ids_are_mapped_to_target_ids() -> None:
    shifted = torch.arange(24) * 10
    wishes = [GREEDY, Sampling(DraftMode.SAMPLED, 1.0, 9, 3)]
    sampler, rows = BlockSampler(wishes, [0, 0], 3, lambda ids: shifted[ids], CPU), logits(2)
    tokens = sampler.pick(rows, 0)
    assert tokens[0] == 10 * rows[0].argmax()
    ids, _ = sampler.candidates()[1]
    assert tokens[1] in ids[0] and (ids % 10 == 0).all()


def test_sampled_noise_is_independent_of_the_targets() -> None:
    num, row = 4000, logits(1, 2)
    pair = [
        BlockSampler([Sampling(mode, 1.0, seed, 2) for seed in range(num)], [0] * num, 3, same, CPU)
        for mode in (DraftMode.SAMPLED, DraftMode.COUPLED)
    ]
    sampled, coupled = (sampler.pick(row.expand(num, -1), 0).numpy() for sampler in pair)
    table = np.histogram2d(sampled, coupled, bins=2)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3
