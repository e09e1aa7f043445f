"""V4's attention: one key-value row per token, a sliding window, compressed entries behind it.

A row serves as key and as value, rotation included, so the output is rotated back at the query's
position. A learned logit per head, the sink, takes part in the softmax without a value. The output
goes through two low-rank projections, the first one per group of heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.deepseek_v4.cache import LayerState
from common.models.deepseek_v4.compressor import Compressor
from common.models.deepseek_v4.config import Compression, DeepseekV4Config
from common.models.deepseek_v4.indexer import Indexer
from common.models.deepseek_v4.rotation import Rotation, rotate, rotate_back
from common.models.deepseek_v4.step import Places, Step
from common.models.deepseek_v4.weights import DeepseekV4Weights

MAX_GATHERED = 1 << 24  # values per tile of gathered rows


class Attention:
    """The attention of one layer or of one drafter stage."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: DeepseekV4Weights,
        prefix: str,
        compression: Compression | None,
    ) -> None:
        """prefix: e.g. `model.layers.0.attn.`."""
        self.config, own = config, weights.shards
        self.parallel = own.parallel
        d, heads, size = config.hidden_size, config.num_heads, config.head_dim
        groups, low = config.o_groups, config.o_lora_rank
        fused = f"{prefix}fused_wqa_wkv"
        self.wq_a = weights.linear(d, (fused, 0, config.q_lora_rank))
        self.wkv = weights.linear(d, (fused, 1, size))
        self.q_norm = weights.norm(f"{prefix}q_norm", config.q_lora_rank)
        self.wq_b = weights.linear(
            config.q_lora_rank, (f"{prefix}wq_b", None, heads * size), only_rows=own.head_rows
        )
        self.kv_norm = weights.norm(f"{prefix}kv_norm", size)
        self.sink = weights.float32(f"{prefix}attn_sink", (heads,), own.heads)
        shape = (groups * low, heads * size // groups)
        wo_a = weights.matrix(f"{prefix}wo_a", shape, only_rows=own.group_rows)
        self.wo_a = wo_a.unflatten(0, (-1, low)).transpose(1, 2)
        self.wo_b = weights.linear(
            groups * low, (f"{prefix}wo_b", None, d), only_cols=own.group_rows
        )
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if compression is not None:
            self.compressor = Compressor(config, weights, f"{prefix}compressor.", compression, size)
            if compression.overlap:
                self.indexer = Indexer(config, weights, f"{prefix}indexer.", compression)

    def __call__(self, x: Tensor, step: Step, state: LayerState) -> Tensor:
        """x: normed rows [T, d]. Writes everything that the rows leave behind; returns [T, d]."""
        turn = step.turn if self.compressor is None else step.compress_turn
        q_low = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_low).unflatten(1, (-1, self.config.head_dim))
        q = rotate(F.rms_norm(q, q.shape[2:], None, self.config.norm_eps), turn)
        state.rows.index_copy_(0, step.slots, self.key_rows(x, turn))
        places, exists = self._keys(x, q_low, step, state)
        # What does not exist points at the row itself: its own values are never another request's.
        places = places.where(exists, step.slots[:, None])
        attend = attend_apart if step.apart else attend_tiled
        out = attend(q, state.rows, places, exists, self.sink)
        out = rotate_back(out, turn).reshape(x.shape[0], self.wo_a.shape[0], -1)
        low = torch.bmm(out.transpose(0, 1), self.wo_a).transpose(0, 1)
        return self.parallel.sum(self.wo_b(low.reshape(x.shape[0], -1)), in_rank_order=step.apart)

    def key_rows(self, x: Tensor, turn: Rotation) -> Tensor:
        """Key-value rows [T, head_dim] of x [T, d]."""
        return rotate(self.kv_norm(self.wkv(x))[:, None], turn).squeeze(1)

    def _keys(self, x: Tensor, q_low: Tensor, step: Step, state: LayerState) -> Places:
        """Window first, entries next; entries lie behind the window rows of all requests."""
        places, exists = step.window(self.config.sliding_window)
        if self.compressor is None:
            return places, exists
        assert state.raw is not None
        self.compressor.update(x, step, state.raw, state.rows[state.num_slots :])
        if self.indexer is not None:
            entries, real = self.indexer.select(x, q_low, step, state)
        else:
            entries, real = step.visible(self.compressor.compression.rate)
        return torch.cat([places, entries + state.num_slots], 1), torch.cat([exists, real], 1)


def attend_tiled(q: Tensor, rows: Tensor, places: Tensor, exists: Tensor, sink: Tensor) -> Tensor:
    """q [T, H, D]; row t attends to rows[places[t]] where exists[t]. Returns [T, H, D]."""
    tile = max(1, MAX_GATHERED // (places.shape[1] * rows.shape[1]))
    return torch.cat(
        [
            _attend(*parts, rows, sink)
            for parts in zip(q.split(tile), places.split(tile), exists.split(tile), strict=True)
        ]
    )


def attend_apart(q: Tensor, rows: Tensor, places: Tensor, exists: Tensor, sink: Tensor) -> Tensor:
    """The same, row by row over the keys that the row has: shapes depend on nothing else."""
    parts = []
    for i in range(q.shape[0]):
        own = places[i : i + 1, exists[i]]
        parts.append(_attend(q[i : i + 1], own, torch.ones_like(own, dtype=torch.bool), rows, sink))
    return torch.cat(parts)


def _attend(q: Tensor, places: Tensor, exists: Tensor, rows: Tensor, sink: Tensor) -> Tensor:
    keys = rows[places]
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * q.shape[2] ** -0.5
    scores = scores.masked_fill(~exists[:, None], -torch.inf)
    sinks = sink[None, :, None].expand(scores.shape[0], -1, 1)
    weights = torch.cat([scores, sinks], dim=2).softmax(2)[:, :, :-1]
    return torch.bmm(weights.to(keys.dtype), keys)
