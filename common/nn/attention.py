"""Attention of ragged query rows over a paged KV cache, grouped-query heads included.

A batch says where each request's rows and keys are; it is prepared once per step and shared by all
layers. Query heads that share a key head are folded into rows, so that no key is repeated. Does not
write keys, does not rotate, knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from common.nn.paged_kv import PagedKV


@dataclass(frozen=True)
class Segment:
    """The rows of one request inside a batch."""

    query_start: int  # first row in the batch
    num_query: int  # rows
    context_len: int  # keys that the LAST row sees, its own included
    block_table: Sequence[int]  # KV blocks of positions 0..context_len


@dataclass
class AttentionBatch:
    """Rows of several requests.

    causal=True: row i of a segment sees its first context_len - (num_query - 1 - i) keys.
    causal=False (a draft block): every row sees all context_len keys of its segment.
    """

    segments: Sequence[Segment]  # in row order, covering every row
    slots: Tensor  # [T] int64: where each row's own key and value go
    positions: Tensor  # [T] int64
    causal: bool = True
    _spans: "list[_Span] | None" = field(default=None, repr=False)

    def spans(self, kv: PagedKV, groups: int) -> "list[_Span]":
        """Where queries, keys and masks are; worked out on first use, the same for every layer."""
        if self._spans is None:
            self._spans = [_span(segment, kv, groups, self.causal) for segment in self.segments]
        return self._spans


@dataclass(frozen=True)
class _Span:
    """One segment, ready to run. Keys lie in the slots `run`, or in `slots` if scattered."""

    start: int
    num_query: int
    run: slice
    slots: Tensor | None  # [context_len] int64
    mask: Tensor | None  # [num_query * groups, context_len], 0 or -inf


def _span(segment: Segment, kv: PagedKV, groups: int, causal: bool) -> _Span:
    size, num_keys, n = kv.kv_block_size, segment.context_len, segment.num_query
    num_blocks = -(-num_keys // size)
    table = list(segment.block_table[:num_blocks])
    assert len(table) == num_blocks, f"{len(table)} blocks cannot hold {num_keys} keys of {segment}"
    first = table[0]
    run, slots = slice(first * size, first * size + num_keys), None
    if table != list(range(first, first + num_blocks)):
        blocks = torch.tensor(table, dtype=torch.int64)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:num_keys].to(kv.device)
    mask = None
    if causal and n > 1:
        mask = torch.zeros(n, groups, num_keys, dtype=kv.dtype, device=kv.device)
        ahead = torch.full((n, n), -torch.inf, dtype=kv.dtype, device=kv.device).triu_(1)
        mask[:, :, num_keys - n :] = ahead[:, None]
        mask = mask.flatten(0, 1)
    return _Span(segment.query_start, n, run, slots, mask)


def attend(q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
    """q: [T, H, D], rotated; keys of all rows already written. Returns [T, H, D].

    Rows after the last segment are padding: their result is zero.
    """
    groups = q.shape[1] // kv.num_kv_heads
    parts = [_attend_span(q, kv, layer, span, scale) for span in batch.spans(kv, groups)]
    num_padding = q.shape[0] - batch.slots.shape[0]
    if num_padding:
        parts.append(q.new_zeros(num_padding, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_span(q: Tensor, kv: PagedKV, layer: int, span: _Span, scale: float) -> Tensor:
    n, heads, (num_heads, head_dim) = span.num_query, kv.num_kv_heads, q.shape[1:]
    rows = kv.rows[layer]
    rows = rows[span.run] if span.slots is None else rows.index_select(0, span.slots)
    k, v = rows.transpose(0, 1).unsqueeze(0).split(heads, dim=1)  # [1, kv heads, keys, D] each
    own = q.narrow(0, span.start, n)
    if n == 1:
        folded = own.view(1, heads, num_heads // heads, head_dim)
    else:
        folded = own.view(n, heads, -1, head_dim).transpose(0, 1).reshape(1, heads, -1, head_dim)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=span.mask, scale=scale)
    if n == 1:
        return out.reshape(1, num_heads, head_dim)
    return out.view(heads, n, -1, head_dim).transpose(0, 1).reshape(n, num_heads, head_dim)
