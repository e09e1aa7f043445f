"""DeepSeek-V4's target: embedding, layers over parallel residual streams, taps, head.

The interface is that of the dense targets: rows of several requests side by side in, one row each
out. Numerics. "fast" runs whatever rows it is given in one go. "batch_invariant" runs slices of
exactly SLICE rows and keeps rows apart inside them, so that a row's logits, taps and state depend
on nothing but its own tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.deepseek_v4.attention import Attention
from common.models.deepseek_v4.cache import (
    DeepseekV4Cache,
    LayerState,
    recent_blocks_needed,
    target_reach,
)
from common.models.deepseek_v4.config import Compression, DeepseekV4Config
from common.models.deepseek_v4.mhc import HyperConnection, HyperHead
from common.models.deepseek_v4.moe import MixtureOfExperts
from common.models.deepseek_v4.rotation import PairRotary, Rotaries
from common.models.deepseek_v4.step import Step, step_of
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.models.interfaces import Numerics
from common.models.invariance import SLICE, rows_of
from common.nn.attention import AttentionBatch, Segment
from common.nn.vocab_head import Midway, VocabHead


class Layer:
    """Attention and experts, each between a read from and a write to the streams."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: DeepseekV4Weights,
        prefix: str,
        compression: Compression | None,
        by_token_id: bool,
    ) -> None:
        """prefix: e.g. `model.layers.0.`; by_token_id: experts are chosen by token id."""
        d = config.hidden_size
        self.hc_attn = HyperConnection(config, weights, f"{prefix}hc_attn_")
        self.attn_norm = weights.norm(f"{prefix}attn_norm", d)
        self.attention = Attention(config, weights, f"{prefix}attn.", compression)
        self.hc_ffn = HyperConnection(config, weights, f"{prefix}hc_ffn_")
        self.ffn_norm = weights.norm(f"{prefix}ffn_norm", d)
        self.experts = MixtureOfExperts(config, weights, f"{prefix}ffn.", by_token_id)

    def __call__(self, h: Tensor, step: Step, state: LayerState) -> Tensor:
        """h: the streams [T, hc, d] -> the streams after the layer."""
        x, post, comb = self.hc_attn.read(h)
        h = self.hc_attn.write(self.attention(self.attn_norm(x), step, state), h, post, comb)
        x, post, comb = self.hc_ffn.read(h)
        y = self.experts(self.ffn_norm(x), step.token_ids, step.apart)
        return self.hc_ffn.write(y, h, post, comb)


class DeepseekV4Target:
    """The target in memory."""

    def __init__(
        self, config: DeepseekV4Config, weights: DeepseekV4Weights, numerics: Numerics = "fast"
    ) -> None:
        self.config, self.numerics = config, numerics
        self.dtype, self.device = weights.dtype, torch.device(weights.device)
        vocab = (config.vocab_size, config.hidden_size)
        self.embed_tokens = weights.tensor("model.embed_tokens.weight", vocab)
        self.layers = [
            Layer(config, weights, f"model.layers.{i}.", compression, i < config.num_hash_layers)
            for i, compression in enumerate(config.compressions)
        ]
        self.hc_head = HyperHead(config, weights)
        self.norm = weights.norm("model.norm", config.hidden_size)
        head = head_of(weights)
        self.lm_head = None if head is None else VocabHead(head)
        self.rotaries = rotaries_of(config, self.device)

    def num_recent_blocks(
        self, kv_block_size: int, max_requests: int, max_batch_tokens: int
    ) -> int:
        """`new_kv`'s number that suffices for so many live requests and rows per forward."""
        return recent_blocks_needed(self.config, kv_block_size, max_requests, max_batch_tokens)

    def new_kv(
        self,
        num_blocks: int,
        kv_block_size: int,
        num_recent_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> DeepseekV4Cache:
        """A cache that fits this model. kv_block_size: a multiple of its compression rates.

        num_recent_blocks: see DeepseekV4Cache.
        """
        return DeepseekV4Cache(
            self.config,
            self.config.compressions,
            target_reach(self.config),
            num_blocks,
            kv_block_size,
            self.dtype,
            device or self.device,
            num_recent_blocks,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        kv: DeepseekV4Cache,
        batch: AttentionBatch,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """token_ids [T] int64. Returns rows [T, d] for `logits`, and the taps.

        taps: 0-based layers whose output, averaged over the streams, is returned side by side in
        list order, [T, len(taps) * d]. None if no taps. `kv` must be prepared for the segments.
        """
        assert batch.causal, "a target's rows see their past only"
        if self.numerics == "fast":
            return self._rows(step_of(token_ids, batch, kv, self.rotaries), kv, taps)
        return self._slices(token_ids, kv, batch, taps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, midway: Midway | None = None) -> Tensor:
        """hidden: rows of `forward`, [N, d] -> float32 [N, vocab_size], before any sampling."""
        assert self.lm_head is not None, "rank 0 alone has the head"
        if self.numerics == "fast":
            slices = [self.norm(hidden).float()]
        else:
            slices = [self.norm(hidden[rows]).float() for rows in _slices_of(len(hidden))]
        return self.lm_head(slices, len(hidden), midway)

    def _rows(
        self, step: Step, kv: DeepseekV4Cache, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        h = streams_of(F.embedding(step.token_ids, self.embed_tokens), self.config.hc_mult)
        kept: dict[int, Tensor] = {}
        for i, (layer, state) in enumerate(zip(self.layers, kv.layers, strict=True)):
            h = layer(h, step, state)
            if i in taps:
                kept[i] = h.float().mean(1).to(h.dtype)
        return self.hc_head(h), torch.cat([kept[i] for i in taps], dim=1) if taps else None

    def _slices(
        self, token_ids: Tensor, kv: DeepseekV4Cache, batch: AttentionBatch, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Slice by slice through all layers, in row order: a row sees only rows before it."""
        segments = [row for segment in batch.segments for row in rows_of(segment)]
        hidden, tapped = [], []
        for rows in _slices_of(len(segments)):
            own = [
                Segment(i, 1, segments[row].context_len, segments[row].block_table)
                for i, row in enumerate(rows.tolist())
            ]
            part = AttentionBatch(own, batch.slots[rows], batch.positions[rows])
            step = step_of(token_ids[rows], part, kv, self.rotaries, apart=True)
            x, t = self._rows(step, kv, taps)
            hidden.append(x)
            if t is not None:
                tapped.append(t)
        count = len(segments)
        return torch.cat(hidden)[:count], torch.cat(tapped)[:count] if tapped else None


def rotaries_of(config: DeepseekV4Config, device: torch.device) -> Rotaries:
    """The two rotations that the config asks for."""
    return Rotaries(PairRotary(config.rope, device), PairRotary(config.compress_rope, device))


def head_of(weights: DeepseekV4Weights) -> Tensor | None:
    """The head's weight, float32 [vocab, d]; None on ranks that have none."""
    name, config = "lm_head.weight", weights.config
    if weights.shards.leads:
        return weights.float32(name, (config.vocab_size, config.hidden_size))
    weights.leave(name)
    return None


def streams_of(x: Tensor, hc_mult: int) -> Tensor:
    """[T, d] -> equal streams [T, hc, d]."""
    return x[:, None].expand(-1, hc_mult, -1).contiguous()


def _slices_of(num_rows: int) -> list[Tensor]:
    """Row numbers, SLICE at a time; the last slice is filled up by repeating the last row.

    A repeated row computes and writes what the row itself does.
    """
    padded = -(-num_rows // SLICE) * SLICE
    return list(torch.arange(padded).clamp(max=num_rows - 1).split(SLICE))
