"""The forward that dense decoder-only targets share: embedding, blocks, taps, head.

Activations are 2-D [tokens, d]: rows of several requests side by side, prefill and decoding alike.
Knows requests only as an AttentionBatch; samples nothing.

Numerics. "fast" runs whatever rows it is given in one go; kernels may then round a row differently
beside other rows. "batch_invariant" runs every row in a slice of exactly SLICE rows (padded), each
row with its own attention call, so that every kernel sees the same shapes always and a row's
logits, taps and KV depend on nothing but its own tokens.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common.loading.safetensors_files import Checkpoint
from common.models.config import TargetConfig
from common.models.interfaces import Numerics
from common.models.invariance import SLICE, rows_of
from common.nn.attention import AttentionBatch, Segment
from common.nn.block import Block, RMSNorm
from common.nn.paged_kv import PagedKV
from common.nn.rope import Rotary
from common.nn.vocab_head import Midway, VocabHead


class DenseTarget:
    """A target in memory. Families differ in `qk_norm` and in their config, not in tensor names."""

    family: ClassVar[str]
    qk_norm: ClassVar[bool]

    def __init__(
        self, config: TargetConfig, weights: Checkpoint, numerics: Numerics = "fast"
    ) -> None:
        self.config, self.numerics = config, numerics
        self.dtype, self.device = weights.dtype, torch.device(weights.device)
        vocab = (config.vocab_size, config.hidden_size)
        self.embed_tokens = weights.take("model.embed_tokens.weight", vocab)
        self.blocks = [
            Block(config.block, i, f"model.layers.{i}.", weights.take)
            for i in range(config.num_layers)
        ]
        norm = weights.take("model.norm.weight", (config.hidden_size,))
        self.norm = RMSNorm(norm, config.block.norm_eps)
        if config.tied_embeddings:
            weights.ignore("lm_head.weight")
            self.lm_head = VocabHead(self.embed_tokens)
        else:
            self.lm_head = VocabHead(weights.take("lm_head.weight", vocab))
        for i in range(config.num_layers):
            weights.ignore(f"model.layers.{i}.self_attn.rotary_emb.inv_freq")
        self.rotary = Rotary(config.rope, weights.device)

    def num_recent_blocks(
        self, kv_block_size: int, max_requests: int, max_batch_tokens: int
    ) -> None:
        """Old positions need as much room as new ones."""

    def new_kv(
        self,
        num_blocks: int,
        kv_block_size: int,
        num_recent_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> PagedKV:
        """A cache that fits this model."""
        assert num_recent_blocks is None, num_recent_blocks
        config = self.config
        return PagedKV(
            config.num_layers,
            num_blocks,
            kv_block_size,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            device or self.device,
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, kv: PagedKV, batch: AttentionBatch, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """token_ids [T] int64. Returns the residual stream [T, d] for `logits`, and the taps.

        taps: 0-based decoder layers whose output rows (residual stream after the layer) are
        returned side by side in list order, [T, len(taps) * d]; -1 is the embedding's output. None
        if no taps.
        """
        if self.numerics == "fast":
            return self._rows(token_ids, batch.positions, kv, batch, taps)
        return self._slices(token_ids, kv, batch, taps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, midway: Midway | None = None) -> Tensor:
        """hidden: rows of `forward`, [N, d]. Returns float32 [N, vocab_size], unscaled."""
        if self.numerics == "fast":
            slices = [self.norm(hidden)]
        else:
            slices = [self.norm(_padded(part)) for part in hidden.split(SLICE)]
        return self.lm_head(slices, hidden.shape[0], midway)

    def _rows(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: PagedKV,
        batch: AttentionBatch,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        x = F.embedding(token_ids, self.embed_tokens)
        rotation = self.rotary.rows(positions, x.dtype)
        kept = {-1: x} if -1 in taps else {}
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, kv, batch)
            if i in taps:
                kept[i] = x
        return x, torch.cat([kept[i] for i in taps], dim=1) if taps else None

    def _slices(
        self, token_ids: Tensor, kv: PagedKV, batch: AttentionBatch, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Slice by slice through all layers: exact, because a row sees only rows before it."""
        assert batch.causal, "slices in row order need causal attention"
        segments = [row for segment in batch.segments for row in rows_of(segment)]
        hidden, tapped = [], []
        for start in range(0, len(segments), SLICE):
            rows = slice(start, min(start + SLICE, len(segments)))
            count = rows.stop - start
            own = [
                Segment(i, 1, row.context_len, row.block_table)
                for i, row in enumerate(segments[rows])
            ]
            part = AttentionBatch(own, batch.slots[rows], batch.positions[rows], isolated=True)
            x, t = self._rows(_padded(token_ids[rows]), _padded(part.positions), kv, part, taps)
            hidden.append(x[:count])
            if t is not None:
                tapped.append(t[:count])
        return torch.cat(hidden), torch.cat(tapped) if tapped else None


def _padded(rows: Tensor) -> Tensor:
    """rows [n, ...] with zero rows up to SLICE."""
    missing = SLICE - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows
