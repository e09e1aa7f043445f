"""Rope configs: which are refused, which are the same, and how long a context they allow."""

import pytest
import torch

from common.errors import LoadError
from common.nn.rope import Rotary, rope_config, rotate

BASE = {"max_position_embeddings": 4096, "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("scaling", "max_context_len"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 2.0}, 8192),
        (LLAMA3, 4096),
    ],
)
def test_context_length(scaling: dict[str, object] | None, max_context_len: int) -> None:
    config = rope_config(BASE | {"rope_scaling": scaling}, 16, "config.json")
    assert config.max_context_len == max_context_len


def test_both_spellings_are_the_same_rope() -> None:
    old = rope_config(BASE | {"rope_scaling": LLAMA3}, 16, "x")
    new = rope_config(
        {"max_position_embeddings": 4096, "rope_parameters": LLAMA3 | {"rope_theta": 1e6}}, 16, "x"
    )
    assert old.canonical() == new.canonical()
    assert old.canonical() != rope_config(BASE, 16, "x").canonical()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": None}}, "lacks high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "at least 1"),
        ({"rope_theta": 0.0}, "must be > 0"),
        ({"rope_theta": None}, "rope's rope_theta is None; a number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "4"}},
            "rope's factor is '4'; a number",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor 1.0 must be above",
        ),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_refusals_name_the_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        rope_config(BASE | change, 16, "config.json")


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotary = Rotary(rope_config(BASE, 16, "x"))
    q, k = torch.randn(1, 1, 16).double(), torch.randn(1, 1, 16).double()

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, rotary.rows(torch.tensor([position]), torch.float64))

    assert at(q, 77).norm() == pytest.approx(q.norm().item())
    near, far = (at(q, 5 + n) * at(k, n) for n in (0, 90))
    assert near.sum().item() == pytest.approx(far.sum().item(), abs=1e-5)
