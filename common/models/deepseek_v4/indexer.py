"""Picks, for each row of a CSA layer, the compressed entries that it attends to.

Scores are a weighted sum over index heads of relu(query . key); weights may be negative. The
Hadamard rotation of the released code cancels in the dot product and is left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.deepseek_v4.cache import LayerState
from common.models.deepseek_v4.compressor import Compressor
from common.models.deepseek_v4.config import Compression, DeepseekV4Config
from common.models.deepseek_v4.rotation import rotate
from common.models.deepseek_v4.step import Places, Step
from common.models.deepseek_v4.weights import DeepseekV4Weights

MAX_SCORES = 1 << 24  # values per tile of [rows, heads, entries]: 64 MiB


class Indexer:
    """Index queries, their head weights, and the compressor of the index keys."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: DeepseekV4Weights,
        prefix: str,
        compression: Compression,
    ) -> None:
        """prefix: e.g. `model.layers.2.attn.indexer.`."""
        num_heads, size = config.index_num_heads, config.index_head_dim
        self.rate, self.topk, self.head_dim = compression.rate, config.index_topk, size
        self.wq_b = weights.linear(config.q_lora_rank, (f"{prefix}wq_b", None, num_heads * size))
        self.weights_proj = weights.linear(
            config.hidden_size, (f"{prefix}weights_proj", None, num_heads)
        )
        self.scale = (size * num_heads) ** -0.5
        self.compressor = Compressor(config, weights, f"{prefix}compressor.", compression, size)

    def select(self, x: Tensor, q_low: Tensor, step: Step, state: LayerState) -> Places:
        """x [T, d], q_low [T, q_lora_rank]: where the index_topk best entries of each row lie.

        All visible entries if there are no more than that. Entries come in rising order, so that
        the order does not depend on the scores.
        """
        assert state.index_raw is not None and state.index_keys is not None
        self.compressor.update(x, step, state.index_raw, state.index_keys)
        if step.max_visible(self.rate) <= self.topk:
            return step.visible(self.rate)
        q = rotate(self.wq_b(q_low).unflatten(1, (-1, self.head_dim)), step.compress_turn).float()
        weights = self.weights_proj(x).float() * self.scale
        entries = torch.cat(
            [self._best(q, weights, step, state.index_keys, i) for i in range(len(step.segments))]
        )
        exists = entries < step.num_visible(self.rate)[:, None]
        return step.entry_places(entries, exists, self.rate)

    def _best(
        self, q: Tensor, weights: Tensor, step: Step, index_keys: Tensor, segment_id: int
    ) -> Tensor:
        """Entry numbers [num_query, topk] for one segment; too high a number stands for none."""
        segment = step.segments[segment_id]
        num_entries, num_rows = segment.context_len // self.rate, segment.num_query
        entries = torch.arange(num_entries, device=q.device)
        if num_entries <= self.topk:
            return F.pad(
                entries.expand(num_rows, -1), (0, self.topk - num_entries), value=num_entries
            )
        rows = torch.arange(num_rows, device=q.device) + segment.query_start
        places = step.entry_place(rows[:1], entries[None], self.rate)
        keys = index_keys[places[0]].float()
        visible = step.num_visible(self.rate)
        tile = max(1, MAX_SCORES // (q.shape[1] * num_entries))
        best = []
        for own in rows.split(tile):
            scores = (F.linear(q[own], keys).relu_() * weights[own, :, None]).sum(1)
            scores = scores.masked_fill(entries >= visible[own, None], -torch.inf)
            best.append(scores.topk(self.topk, dim=1).indices.sort(dim=1).values)
        return torch.cat(best)
