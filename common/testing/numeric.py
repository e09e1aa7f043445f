"""Differences between tensors, worded so that a failing test says where and by how much."""

import torch
from torch import Tensor


def max_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; NaN anywhere counts as infinite. Shapes must be equal."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    if actual.numel() == 0:
        return 0.0
    worst = (actual.double() - expected.double()).abs().max().item()
    return float("inf") if worst != worst else worst


def first_mismatch(actual: Tensor, expected: Tensor) -> str:
    """'' if the two are equal bit for bit, else where they first differ, and how often."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"{actual.dtype} {tuple(actual.shape)} against {expected.dtype} {tuple(expected.shape)}"
        )
    differs = actual != expected
    count = int(differs.sum())
    if count == 0:
        return ""
    place = tuple(int(i) for i in torch.nonzero(differs)[0])
    return (
        f"{count} of {actual.numel()} differ, first at {place}: {actual[place].item()!r} against "
        f"{expected[place].item()!r}"
    )
