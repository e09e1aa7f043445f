"""Manifold-constrained hyper-connections: how a sub-block reads and writes the residual streams.

Source: DeepSeek-V4's public description and the transformers implementation. Everything in float32,
cast once at the end. Knows no attention and no experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.deepseek_v4.config import DeepseekV4Config
from common.models.deepseek_v4.weights import DeepseekV4Weights


class HyperConnection:
    """One sub-block's mixing of the streams h [T, hc, d]."""

    def __init__(self, config: DeepseekV4Config, weights: DeepseekV4Weights, prefix: str) -> None:
        """prefix: e.g. `model.layers.0.hc_attn_`."""
        self.config = config
        hc = config.hc_mult
        self.fn, self.base, self.scale = _mixing(config, weights, prefix, (2 + hc) * hc, 3)

    def read(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h -> the sub-block's input [T, d]; for `write`, post [T, hc] and comb [T, hc, hc]."""
        hc, eps = self.config.hc_mult, self.config.hc_eps
        mixed = _project(h, self.fn, self.config.norm_eps).split([hc, hc, hc * hc], dim=1)
        base = self.base.split([hc, hc, hc * hc])
        pre, post, comb = (
            z * scale + b for z, scale, b in zip(mixed, self.scale.unbind(), base, strict=True)
        )
        comb = comb.unflatten(1, (hc, hc)).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return _weighted(h, pre.sigmoid() + eps), 2 * post.sigmoid(), comb

    def write(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """y: the output [T, d]. Stream k: post_k * y + sum over j of comb[j, k] * h_j."""
        kept = torch.bmm(comb.transpose(1, 2), h.float())
        return (kept + post[:, :, None] * y.float()[:, None]).to(h.dtype)


class HyperHead:
    """Folds the streams into one before the final norm."""

    def __init__(self, config: DeepseekV4Config, weights: DeepseekV4Weights) -> None:
        self.config = config
        self.fn, self.base, self.scale = _mixing(
            config, weights, "model.hc_head_", config.hc_mult, 1
        )

    def __call__(self, h: Tensor) -> Tensor:
        """[T, hc, d] -> [T, d]."""
        z = _project(h, self.fn, self.config.norm_eps) * self.scale + self.base
        return _weighted(h, z.sigmoid() + self.config.hc_eps)


def _mixing(
    config: DeepseekV4Config, weights: DeepseekV4Weights, prefix: str, rows: int, num_scales: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        weights.float32(prefix + "fn", (rows, config.hc_mult * config.hidden_size)),
        weights.float32(prefix + "base", (rows,)),
        weights.float32(prefix + "scale", (num_scales,)),
    )


def _project(h: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn on the root-mean-square normed streams, side by side, stream after stream."""
    flat = h.float().flatten(1)
    return F.linear(F.rms_norm(flat, (flat.shape[1],), None, eps), fn)


def _weighted(h: Tensor, pre: Tensor) -> Tensor:
    return (pre[:, :, None] * h.float()).sum(1).to(h.dtype)
