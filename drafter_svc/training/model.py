"""The drafter as the trainer sees it: DeepSpec's Qwen3 DSpark, many blocks per text at once.

Parameter names are DeepSpec's, so the state dict is the checkpoint. float32 masters, computed in
the dtype of the incoming rows. Context rows come from the target's taps; block rows are the
anchor's and the mask token's embeddings. Does not sample, does not keep a KV cache, knows only the
vanilla Markov head.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter_svc.training.rope import rotary_tables, rotate


@dataclass
class DrafterConfig:
    """Shape of a drafter; `as_checkpoint` gives DeepSpec's config.json."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    num_target_layers: int
    target_layer_ids: list[int] = field(default_factory=list)
    num_hidden_layers: int = 2
    block_size: int = 6
    markov_rank: int = 48
    mask_token_id: int = 16
    num_anchors: int = 128

    def as_checkpoint(self) -> dict[str, Any]:
        """config.json in DeepSpec's flat form."""
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            **asdict(self),
        }


@dataclass
class Blocks:
    """A packed step: texts side by side, each with its anchors. C context rows, A anchors in all.

    features: [C, m * d] taps; context_lens: context rows per text; num_anchors: anchors per text;
    anchors: [A] position of each anchor in its own text; tokens: [A, B + 1] target ids from the
    anchor on.
    """

    features: Tensor
    context_lens: list[int]
    num_anchors: list[int]
    anchors: Tensor
    tokens: Tensor


@dataclass
class Columns:
    """Draft ids [n] that a training step looks at, and how many ids each stands for, [n]."""

    ids: Tensor
    shares: Tensor

    def find(self, draft_ids: Tensor, vocab_size: int) -> Tensor:
        """Where these draft ids (−1: none) lie among the columns, or −1."""
        places = torch.full((vocab_size + 1,), -1)
        places[self.ids] = torch.arange(len(self.ids))
        return places[draft_ids]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Linear(nn.Linear):
    """A linear layer whose float32 weight is cast to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Attention(nn.Module):
    """Block rows attend to the context before their anchor and to all rows of their own block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, self.head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(d, self.num_heads * self.head_dim, bias=False)
        self.k_proj = Linear(d, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = Linear(d, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(self.num_heads * self.head_dim, d, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def _keys_values(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        shape = (self.num_kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(rows).unflatten(-1, shape)), *rotation)
        return keys, self.v_proj(rows).unflatten(-1, shape)

    def forward(self, rows: Tensor, context: Tensor, step: "Step") -> Tensor:
        """rows: [A * B, d] normed block rows; context: [C, d]; returns [A * B, d]."""
        q = self.q_proj(rows).unflatten(-1, (self.num_heads, self.head_dim))
        q = rotate(self.q_norm(q), *step.block_rotation) * self.head_dim**-0.5
        own = self._keys_values(rows, step.block_rotation)
        seen = self._keys_values(context, step.context_rotation)
        mixed, row, place = [], 0, 0
        for length, count, hidden in zip(
            step.blocks.context_lens, step.blocks.num_anchors, step.hidden_context, strict=True
        ):
            some = slice(row, row + count * step.block_size)
            there = slice(place, place + length)
            mixed.append(
                self._mix(
                    q[some],
                    (own[0][some], own[1][some]),
                    (seen[0][there], seen[1][there]),
                    hidden,
                    step.block_size,
                )
            )
            row, place = some.stop, there.stop
        return self.o_proj(torch.cat(mixed))

    def _mix(
        self,
        q: Tensor,
        own: tuple[Tensor, Tensor],
        seen: tuple[Tensor, Tensor],
        hidden: Tensor,
        block_size: int,
    ) -> Tensor:
        """One text. q: [n * B, H, D]; own, seen: keys, values; hidden: [n, T], True = unseen."""
        groups = self.num_heads // self.num_kv_heads
        n, context_len = q.shape[0] // block_size, seen[0].shape[0]
        # [kv heads, n, B * groups, D]: the heads that share a key lie side by side.
        q = q.view(n, block_size, self.num_kv_heads, groups, self.head_dim).permute(2, 0, 1, 3, 4)
        q = q.reshape(self.num_kv_heads, n, block_size * groups, self.head_dim)
        flat = q.flatten(1, 2)
        far = torch.bmm(flat, seen[0].permute(1, 2, 0)).view(*q.shape[:3], context_len)
        far = far.masked_fill(hidden[None, :, None], -torch.inf)
        keys, values = (
            x.view(n, block_size, self.num_kv_heads, self.head_dim).permute(2, 0, 1, 3) for x in own
        )
        near = torch.matmul(q, keys.transpose(-1, -2))
        weights = torch.cat([far, near], dim=-1).softmax(-1)
        far, near = weights.split([context_len, block_size], dim=-1)
        out = torch.matmul(near, values)
        out = out + torch.bmm(far.flatten(1, 2), seen[1].transpose(0, 1)).view_as(out)
        out = out.view(self.num_kv_heads, n, block_size, groups, self.head_dim)
        return out.permute(1, 2, 0, 3, 4).reshape(n * block_size, -1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm block; the context enters attention as it is, without input_layernorm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, rows: Tensor, context: Tensor, step: "Step") -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), context, step)
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


class MarkovHead(nn.Module):
    """Vanilla: a bias W2·W1[previous token]; W1 by target ids, W2 by draft ids."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """One number per row from [hidden ; W1[previous token]]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size + config.markov_rank, 1)


@dataclass
class Step:
    """What all layers share: rotations and, per text, which context rows each block may not see."""

    blocks: Blocks
    block_size: int
    block_rotation: tuple[Tensor, Tensor]
    context_rotation: tuple[Tensor, Tensor]
    hidden_context: list[Tensor]


class Drafter(nn.Module):
    """Teacher-forced drafter. Embedding and head are the target's [V, d], frozen and not saved."""

    d2t: Tensor
    embed: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: DrafterConfig, embed: Tensor, head: Tensor, d2t: Tensor) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.fc = Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)
        self.register_buffer("d2t", d2t)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("head", head[d2t], persistent=False)
        cos, sin = rotary_tables(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.cos[positions, None].to(dtype), self.sin[positions, None].to(dtype)

    def _step(self, blocks: Blocks, dtype: torch.dtype) -> Step:
        size = blocks.tokens.shape[1] - 1
        ahead = blocks.anchors[:, None] + torch.arange(size)
        places = torch.cat([torch.arange(n) for n in blocks.context_lens])
        hidden, start = [], 0
        for length, count in zip(blocks.context_lens, blocks.num_anchors, strict=True):
            own = blocks.anchors[start : start + count]
            hidden.append(torch.arange(length) >= own[:, None])
            start += count
        return Step(
            blocks,
            size,
            self._rotation(ahead.flatten(), dtype),
            self._rotation(places, dtype),
            hidden,
        )

    def forward(self, blocks: Blocks, columns: Columns | None = None) -> tuple[Tensor, Tensor]:
        """Draft logits [A, B, V] (Markov bias included) and confidence logits [A, B].

        Row k - 1 of a block predicts token k after the anchor, given the true tokens before it.
        V: the draft vocabulary, or a sample of it whose logits are raised by what each stands for.
        """
        dtype, size = blocks.features.dtype, blocks.tokens.shape[1] - 1
        step = self._step(blocks, dtype)
        context = self.hidden_norm(self.fc(blocks.features))
        ids = torch.full((len(blocks.anchors), size), self.config.mask_token_id)
        ids[:, 0] = blocks.tokens[:, 0]
        rows = F.embedding(ids.flatten(), self.embed).to(dtype)
        for layer in self.layers:
            rows = layer(rows, context, step)
        rows = self.norm(rows)
        before = self.markov_head.markov_w1(blocks.tokens[:, :size].flatten()).to(dtype)
        logits = self._logits(rows, before, columns)
        confidence = self.confidence_head.proj(torch.cat([rows, before], dim=-1)).float()
        shape = (len(blocks.anchors), size)
        return logits.view(*shape, -1), confidence.view(shape)

    def _logits(self, rows: Tensor, before: Tensor, columns: Columns | None) -> Tensor:
        head, bias = self.head.to(rows.dtype), self.markov_head.markov_w2.weight
        if columns is None:
            return torch.addmm(F.linear(before, bias.to(rows.dtype)), rows, head.T)
        # The shares ride along as one more input, so that no pass over the logits is needed.
        logs = columns.shares.log().to(rows.dtype)[:, None]
        ones = rows.new_ones(len(rows), 1)
        weight = torch.cat([bias[columns.ids].to(rows.dtype), logs], dim=1)
        return torch.addmm(
            F.linear(torch.cat([before, ones], 1), weight), rows, head[columns.ids].T
        )
