"""Rotary position embedding, Hugging Face's half split, with the scalings of released configs.

Frequencies follow public `transformers` (modeling_rope_utils): default, linear, llama3 and yarn are
functions of the position alone. `dynamic` changes its frequencies with the longest sequence seen,
which no cache of rotated keys can follow: it is served up to `max_position_embeddings`, where it
equals `default`. Does not know models.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.errors import LoadError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """`scaling` holds the keys of the scaling alone, e.g. {"factor": 4.0}; empty for `default`."""

    theta: float
    head_dim: int
    rope_type: str = "default"
    max_position_embeddings: int = 0
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_context_len(self) -> int:
        """Tokens that the position encoding is made for."""
        if self.rope_type == "yarn":
            original = self.scaling.get(
                "original_max_position_embeddings", self.max_position_embeddings
            )
            return max(self.max_position_embeddings, int(original * self.scaling["factor"]))
        if self.rope_type == "linear":
            return int(self.max_position_embeddings * self.scaling["factor"])
        return self.max_position_embeddings

    def canonical(self) -> str:
        """Base and scaling as one JSON text, equal for equal rotations: goes into the contract."""
        value = {"theta": self.theta, "type": self.rope_type, **self.scaling}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


def rope_config(config: Mapping[str, Any], head_dim: int, where: str) -> RopeConfig:
    """Reads both spellings: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`.

    Raises LoadError for a type that is not in ROPE_TYPES, a missing key or a number out of range.
    """
    flat = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(flat, Mapping):
        raise LoadError(f"{where}: rope_scaling is {flat!r}; an object is needed")
    rope_type = flat.get("rope_type", flat.get("type", "default"))
    theta = flat.get("rope_theta", config.get("rope_theta", 10000.0))
    if rope_type not in ROPE_TYPES:
        raise LoadError(
            f"{where}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = flat.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise LoadError(f"{where}: partial_rotary_factor {partial!r} is not supported, only 1")
    known = _KEYS[rope_type]
    scaling = {key: flat[key] for key in sorted(known) if flat.get(key) is not None}
    missing = [key for key in _REQUIRED[rope_type] if key not in scaling]
    if missing:
        raise LoadError(
            f"{where}: rope type {rope_type!r} lacks {', '.join(missing)}; take config.json from "
            "the model's publisher"
        )
    for key, value in {"rope_theta": theta, **scaling}.items():
        if key != "truncate" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise LoadError(f"{where}: rope's {key} is {value!r}; a number is needed")
    if scaling.get("factor", 1.0) < 1.0 or theta <= 0:
        raise LoadError(f"{where}: rope theta {theta} must be > 0, factor {scaling} at least 1")
    low, high = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", 1)
    if high <= low:
        raise LoadError(f"{where}: high_freq_factor {high} must be above low_freq_factor {low}")
    max_positions = config.get("max_position_embeddings")
    if not isinstance(max_positions, int) or max_positions <= 0:
        raise LoadError(
            f"{where}: max_position_embeddings is {max_positions!r}; a positive integer is needed"
        )
    return RopeConfig(float(theta), head_dim, rope_type, max_positions, scaling)


_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_KEYS: dict[str, tuple[str, ...]] = {
    **_REQUIRED,
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


class Rotary:
    """Turns positions into rotations; computed per call, so nothing bounds the context length."""

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        self.head_dim = config.head_dim
        frequencies, self.scale = _frequencies(config)
        # Halves twice, the first one negated in the sine: x * cos + roll(x, D/2) * sin rotates x.
        self._frequencies = torch.cat([frequencies, frequencies]).to(device)
        self._sign = torch.ones(config.head_dim, device=device) * self.scale
        self._sign[: config.head_dim // 2] *= -1

    def rows(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos and signed sin, each [T, 1, head_dim] in `dtype`."""
        angles = positions[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin_().mul_(self._sign)
        if self.scale != 1.0:
            cos = cos.mul_(self.scale)
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x: [T, heads, D]; rotation from `Rotary.rows`."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32 and the factor on cos and sin."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / config.theta**steps
    if config.rope_type == "linear":
        return inverse / config.scaling["factor"], 1.0
    if config.rope_type == "llama3":
        return _llama3(inverse, config.scaling), 1.0
    if config.rope_type == "yarn":
        return _yarn(config, config.theta**steps)
    return inverse, 1.0


def _llama3(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse


def _yarn(config: RopeConfig, wave: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions between kept and interpolated frequencies."""
    scaling, dim = config.scaling, config.head_dim
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings", config.max_position_embeddings)

    def dimension(num_turns: float) -> float:
        waves = math.log(original / (num_turns * 2 * math.pi))
        return dim * waves / (2 * math.log(config.theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # one dimension wide: a step, not a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    inverse = ramp / (factor * wave) + (1 - ramp) / wave
    return inverse, float(scaling.get("attention_factor") or _yarn_attention_factor(scaling))


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        factor: float = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
