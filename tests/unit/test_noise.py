"""The counter-based noise: its law, its independence, a pure function of its arguments."""

import pytest
import torch
from scipy import stats

from common import noise

DOMAINS = (noise.TARGET, noise.ACCEPT, noise.RESIDUAL, noise.DRAFT)


def _grid(num_seeds: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.arange(num_seeds).repeat_interleave(num_positions)
    return seeds, torch.arange(num_positions).repeat(num_seeds)


@pytest.mark.parametrize("domain", DOMAINS)
def test_uniform_is_uniform_over_consecutive_seeds_and_positions(domain: int) -> None:
    values = noise.uniform(*_grid(200, 200), domain)
    assert values.dtype == torch.float64
    assert values.min() > 0.0 and values.max() < 1.0
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-4
    neighbours = torch.stack([values[:-1], values[1:]])
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 0.02


def test_exponential_follows_its_law_at_both_ends() -> None:
    seeds, positions = _grid(20, 20)
    values = noise.exponential(seeds, positions, noise.TARGET, torch.arange(100)).flatten()
    assert stats.kstest(values.numpy(), "expon").pvalue > 1e-4
    assert stats.kstest(-values.log().numpy(), "gumbel_r").pvalue > 1e-4  # near 0 wins races


def test_domains_positions_and_seeds_are_independent() -> None:
    seeds, positions = _grid(100, 100)
    columns = [noise.uniform(seeds, positions, domain) for domain in DOMAINS]
    columns += [noise.uniform(seeds + 1, positions, noise.TARGET)]
    columns += [noise.uniform(positions, seeds, noise.TARGET)]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    # seeds+1 shifts the grid by whole rows: still other values at the same index
    assert correlation.abs().max() < 0.05


def test_a_value_depends_on_nothing_but_its_own_arguments() -> None:
    seeds = torch.tensor([7, noise.to_int64(2**64 - 1), -5])
    positions = torch.tensor([0, 3, 100_000])
    ids = torch.tensor([[4, 9, 49_151], [0, 1, 2], [151_000, 4, 4]])
    dense = noise.exponential(seeds, positions, noise.TARGET, torch.arange(152_000))
    assert torch.equal(noise.exponential(seeds, positions, noise.TARGET, ids), dense.gather(1, ids))
    alone = noise.exponential(seeds[1:2], positions[1:2], noise.TARGET, ids[1])
    assert torch.equal(alone[0], dense[1, :3])
    assert torch.isfinite(dense).all() and dense.min() > 0.0


def test_arguments_are_not_overwritten() -> None:
    seeds, positions = torch.tensor([1, 2]), torch.tensor([3, 4])
    ids = torch.arange(5)
    noise.exponential(seeds, positions, noise.TARGET, ids)
    noise.uniform(seeds, positions, noise.ACCEPT)
    assert seeds.tolist() == [1, 2] and positions.tolist() == [3, 4] and ids.tolist() == [*range(5)]


def test_known_values_pin_the_function_for_peers_of_another_version() -> None:
    seeds, positions = torch.tensor([0, 123_456_789]), torch.tensor([0, 17])
    first = noise.uniform(seeds, positions, noise.ACCEPT)
    assert first.tolist() == pytest.approx(PINNED, abs=1e-15)


PINNED = [0.80255116473696, 0.3471301605280611]
