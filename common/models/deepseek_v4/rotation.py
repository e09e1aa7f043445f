"""V4's rotary embedding: neighbouring channels are a pair, the last channels of a head turn.

The frequencies, YaRN included, are those of `common.nn.rope`. A rotation is computed in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.nn.rope import RopeConfig, Rotary

Rotation = tuple[Tensor, Tensor]  # cos, sin, each [T, 1, rope_head_dim / 2] float32


class PairRotary:
    """Turns positions into rotations."""

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        self._rotary, self._half = Rotary(config, device), config.head_dim // 2

    def __call__(self, positions: Tensor) -> Rotation:
        """positions [T] int64."""
        # The half-split layout repeats each frequency; its second half has the plain sine.
        cos, sin = self._rotary.rows(positions, torch.float32)
        return cos[..., : self._half], sin[..., self._half :]


@dataclass(frozen=True)
class Rotaries:
    """A model's two rotations: of layers without compression, of everything in compressed ones."""

    plain: PairRotary
    compressed: PairRotary


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, D]: channels D - rope_head_dim.. turn, those before them stay."""
    cos, sin = rotation
    size = 2 * cos.shape[-1]
    even, odd = x[..., -size:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :-size], turned.to(x.dtype)], dim=-1)


def rotate_back(x: Tensor, rotation: Rotation) -> Tensor:
    """Undoes `rotate`."""
    cos, sin = rotation
    return rotate(x, (cos, -sin))
