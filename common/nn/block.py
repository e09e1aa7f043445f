"""One pre-norm transformer block (Llama, Qwen3): 2-D activations [tokens, d], a paged KV cache.

Weights are fused and packed as they are read. Norms run in the activations' dtype with a float32
sum inside. Target models and the drafter share this file; it knows no weight file beyond the names
that all of them use.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.nn.attention import AttentionBatch, attend
from common.nn.linear import Linear
from common.nn.paged_kv import PagedKV
from common.nn.rope import rotate

# Reads the tensor of that name, checked to have that shape, in the model's dtype, on its device.
Take = Callable[[str, tuple[int, ...]], Tensor]
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockShape:
    """Sizes that all blocks of a model share."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k, before the rotation
    attention_bias: bool = False
    mlp_bias: bool = False


class RMSNorm:
    """Root-mean-square norm over the last dimension.

    weight: [size], or [..., size] with a row of its own for every head. On a CPU the composite that
    torch has takes ten kernels for few rows; this one takes six, and rounds once.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.size = weight, eps, weight.shape[-1:]
        self._on_cpu = weight.device.type == "cpu"
        # x / sqrt(sum / size + eps) = x * sqrt(size) / sqrt(sum + eps * size)
        self._scaled_weight = weight.float() * weight.shape[-1] ** 0.5
        self._scaled_eps = torch.tensor(eps * weight.shape[-1], device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        if not self._on_cpu:
            own = self.weight if self.weight.dim() == 1 else None
            normed = F.rms_norm(x, self.size, own, self.eps)
            return normed if own is not None else normed * self.weight
        wide = x.float().contiguous()  # torch sums the rows of a strided tensor in another order
        root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._scaled_eps, root, root).rsqrt_()
        return (wide * inverse).mul_(self._scaled_weight).to(x.dtype)


class Block:
    """Attention and SwiGLU MLP with residuals."""

    def __init__(self, shape: BlockShape, layer: int, prefix: str, take: Take) -> None:
        self.shape, self.layer = shape, layer
        d, size = shape.hidden_size, shape.head_dim
        num_q, num_kv, inner = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
        biased, mlp_biased = shape.attention_bias, shape.mlp_bias

        def linear(has_bias: bool, *parts: tuple[str, int, int]) -> Linear:
            weights = [take(f"{prefix}{name}.weight", (rows, cols)) for name, rows, cols in parts]
            biases = [take(f"{prefix}{name}.bias", (rows,)) for name, rows, _ in parts if has_bias]
            return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(take(f"{prefix}{name}.weight", (width,)), shape.norm_eps)

        def head_norm() -> RMSNorm:
            parts = (("q", num_q), ("k", num_kv))
            rows = [
                take(f"{prefix}self_attn.{p}_norm.weight", (size,)).expand(n, -1) for p, n in parts
            ]
            return RMSNorm(torch.cat(rows), shape.norm_eps)

        self.input_norm = norm("input_layernorm", d)
        self.qkv_proj = linear(
            biased,
            ("self_attn.q_proj", num_q * size, d),
            ("self_attn.k_proj", num_kv * size, d),
            ("self_attn.v_proj", num_kv * size, d),
        )
        self.qk_norm = head_norm() if shape.qk_norm else None  # over the heads of q, then of k
        self.o_proj = linear(biased, ("self_attn.o_proj", d, num_q * size))
        self.mlp_norm = norm("post_attention_layernorm", d)
        self.gate_up_proj = linear(
            mlp_biased, ("mlp.gate_proj", inner, d), ("mlp.up_proj", inner, d)
        )
        self.down_proj = linear(mlp_biased, ("mlp.down_proj", d, inner))
        self.scale = size**-0.5

    def __call__(self, x: Tensor, rotation: Rotation, kv: PagedKV, batch: AttentionBatch) -> Tensor:
        """x: residual stream [T, d] -> the next one; writes keys and values of all rows."""
        q, k, v = self._qkv(self.input_norm(x), rotation)
        kv.write(self.layer, batch.slots, k, v)
        x = self.o_proj(attend(q, kv, self.layer, batch, self.scale).flatten(1)).add_(x)
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, dim=1)
        return self.down_proj(F.silu(gate).mul_(up)).add_(x)

    def _qkv(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        num_q, num_kv = self.shape.num_heads, self.shape.num_kv_heads
        heads = self.qkv_proj(x).unflatten(1, (-1, self.shape.head_dim))
        qk, v = heads.split([num_q + num_kv, num_kv], dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotate(qk, rotation).split([num_q, num_kv], dim=1)
        return q, k, v
