"""Attention of ragged query rows over a paged KV cache, grouped-query heads included.

A batch says where each request's rows and keys are; how to run it is worked out once per step and
shared by all layers. Query heads that share a key head are folded into rows, so that no key is
repeated. Does not write keys, does not rotate, knows no model.

Requests with few rows (decoding, verification, a draft block) run together: their keys are gathered
into one padded batch. In bf16 on an AVX-512 CPU that takes half the time of a call per request,
because a small product costs more to start than to compute. Prompts run alone.

Products are padded to multiples of KEY_STEP keys: oneDNN compiles a kernel for every new shape,
0.4 ms each, and a context that grows by every round would never meet the same shape again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from common.nn.paged_kv import PagedKV

MAX_GROUPED_ROWS = 16  # rows of a request that may share a padded batch
# Padded keys of one batch: beyond, the gather costs more than it saves.
MAX_GROUPED_KEYS = {torch.bfloat16: 16384, torch.float32: 2048}
# (rows + 1) * keys of a lone bf16 request up to which the fused kernel wins, where heads share a
# key head and where they do not.
SMALL_PRODUCT, SMALL_UNSHARED = 1200, 5000
KEY_STEP = 64


@dataclass(frozen=True)
class Segment:
    """The rows of one request inside a batch."""

    query_start: int  # first row in the batch
    num_query: int  # rows
    context_len: int  # keys that the LAST row sees, its own included
    block_table: Sequence[int]  # KV blocks of positions 0..context_len - 1


@dataclass
class AttentionBatch:
    """Rows of several requests.

    causal=True: row i of a segment sees its first context_len - (num_query - 1 - i) keys.
    causal=False (a draft block): every row sees all context_len keys of its segment.
    isolated=True: every segment runs alone, in one way, whatever else is in the batch.
    """

    segments: Sequence[Segment]  # in row order, covering every row
    slots: Tensor  # [T] int64: where each row's own key and value go
    positions: Tensor  # [T] int64
    causal: bool = True
    isolated: bool = False
    _groups: "list[_Group] | None" = field(default=None, repr=False)

    def groups(self, kv: PagedKV, shared: int) -> "list[_Group]":
        """How to run this batch; worked out on first use, the same for every layer."""
        if self._groups is None:
            limit = 0 if self.isolated else MAX_GROUPED_KEYS[kv.dtype]
            parts = _partition(self.segments, limit)
            self._groups = [_group(p, kv, shared, self.causal, self.isolated) for p in parts]
        return self._groups


def attend(q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
    """q: [T, H, D], rotated; keys of all rows already written. Returns [T, H, D].

    Rows after the last segment are padding: their result is zero.
    """
    groups = batch.groups(kv, q.shape[1] // kv.num_kv_heads)
    if len(groups) == 1 and isinstance(groups[0].rows, slice) and groups[0].rows.stop == len(q):
        return _attend_group(q, kv, layer, groups[0], scale)
    out = torch.zeros_like(q)
    for group in groups:
        out[group.rows] = _attend_group(q, kv, layer, group, scale)
    return out


@dataclass(frozen=True)
class _Group:
    """Requests that run as one padded batch of R requests, n rows and L keys each."""

    num_requests: int
    num_query: int
    num_keys: int
    rows: slice | Tensor  # of the batch; a ragged group repeats a request's last row up to n
    run: slice | None  # the slots of a lone request whose blocks lie in a row, else:
    keys: Tensor | None  # [R * L] slots
    mask: Tensor | None  # [R, 1, n * shared, L], 0 or -inf
    fused: bool  # scaled_dot_product_attention, not two products


def _partition(segments: Sequence[Segment], max_keys: int) -> list[list[Segment]]:
    """Groups of segments with few rows and alike context lengths; the others alone."""
    if len(segments) == 1 or not max_keys:
        return [[s] for s in segments]
    parts = [[s] for s in segments if s.num_query > MAX_GROUPED_ROWS]
    few = sorted(
        (s for s in segments if s.num_query <= MAX_GROUPED_ROWS),
        key=lambda s: (s.context_len, s.query_start),
    )
    open_part: list[Segment] = []
    for segment in few:
        longest_allowed = 1.5 * open_part[0].context_len + 64 if open_part else 0
        num_keys = (len(open_part) + 1) * segment.context_len
        if segment.context_len > longest_allowed or num_keys > max_keys:
            open_part = []
            parts.append(open_part)
        open_part.append(segment)
    for part in parts:
        part.sort(key=lambda s: s.query_start)
    return parts


def _group(
    part: Sequence[Segment], kv: PagedKV, shared: int, causal: bool, isolated: bool
) -> _Group:
    n, num_keys = max(s.num_query for s in part), max(s.context_len for s in part)
    most = SMALL_PRODUCT if shared > 1 else SMALL_UNSHARED
    small = n > MAX_GROUPED_ROWS or (n + 1) * num_keys <= most
    alone = len(part) == 1 and (small or kv.dtype == torch.float32)
    fused = alone or isolated or kv.device.type != "cpu"
    first, last = part[0], part[-1]
    rows: slice | Tensor = slice(first.query_start, last.query_start + last.num_query)
    in_line = [(first.query_start + i * n, n) for i in range(len(part))]
    if in_line != [(s.query_start, s.num_query) for s in part]:  # ragged, or others lie between
        index = [s.query_start + min(i, s.num_query - 1) for s in part for i in range(n)]
        rows = torch.tensor(index, device=kv.device)
    run = _run_of(first, kv) if len(part) == 1 and fused else None
    if not fused:
        num_keys = -(-num_keys // KEY_STEP) * KEY_STEP
    keys = _keys(part, num_keys, kv) if run is None else None
    mask = _mask(part, n, num_keys, causal, kv)
    if mask is not None:
        mask = mask.repeat_interleave(shared, dim=1).unsqueeze(1)
    return _Group(len(part), n, num_keys, rows, run, keys, mask, fused)


def _run_of(segment: Segment, kv: PagedKV) -> slice | None:
    """The slots of a segment as one slice, if its blocks follow each other."""
    table = _blocks(segment, kv.kv_block_size)
    if table != list(range(table[0], table[0] + len(table))):
        return None
    start = table[0] * kv.kv_block_size
    return slice(start, start + segment.context_len)


def _blocks(segment: Segment, kv_block_size: int) -> list[int]:
    num_blocks = -(-segment.context_len // kv_block_size)
    table = list(segment.block_table[:num_blocks])
    assert len(table) == num_blocks, f"{len(table)} blocks cannot hold the keys of {segment}"
    return table


def _keys(part: Sequence[Segment], num_keys: int, kv: PagedKV) -> Tensor:
    """The slots of all requests' keys, [R * num_keys].

    Padding repeats a request's last key: slots past it hold what others left there, even NaN.
    """
    size = kv.kv_block_size
    tables = [_blocks(segment, size) for segment in part]
    width = max(map(len, tables))
    blocks = torch.tensor([table + table[:1] * (width - len(table)) for table in tables])
    last = torch.tensor([segment.context_len - 1 for segment in part])[:, None]
    positions = torch.arange(num_keys).minimum(last)
    slots = blocks.gather(1, positions // size) * size + positions % size
    return slots.flatten().to(kv.device)


def _mask(
    part: Sequence[Segment], n: int, num_keys: int, causal: bool, kv: PagedKV
) -> Tensor | None:
    """[R, n, num_keys], 0 where the row sees the key; None if every row sees every key."""
    if all(s.context_len == num_keys for s in part) and (n == 1 or not causal):
        return None
    last_row = torch.tensor([s.num_query - 1 for s in part])[:, None]
    seen = torch.tensor([s.context_len for s in part])[:, None].expand(-1, n)
    if causal:
        seen = seen - (last_row - torch.arange(n)).clamp(min=0)
    hidden = torch.arange(num_keys) >= seen[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=kv.dtype)
    return mask.masked_fill_(hidden, -torch.inf).to(kv.device)


def _attend_group(q: Tensor, kv: PagedKV, layer: int, group: _Group, scale: float) -> Tensor:
    """Returns the group's rows, [R * n, H, D]."""
    r, n, num_keys = group.num_requests, group.num_query, group.num_keys
    heads, head_dim = kv.num_kv_heads, kv.head_dim
    if group.keys is None:
        k, v = kv.k_heads[layer][:, :, group.run], kv.v_heads[layer][:, :, group.run]
    else:
        gathered = kv.rows[layer].index_select(0, group.keys)
        by_head = gathered.view(r, num_keys, 2, heads, head_dim).permute(2, 0, 3, 1, 4)
        # A copy more, but then products read each head's keys side by side: twice as fast.
        k, v = (by_head if group.fused else by_head.contiguous()).unbind()
    folded = q[group.rows].view(r * n, heads, -1, head_dim)
    if n > 1:
        folded = (
            folded.view(r, n, heads, -1, head_dim).transpose(1, 2).reshape(r, heads, -1, head_dim)
        )
    if group.fused:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask, scale=scale)
    else:
        scores = torch.matmul(folded * scale, k.transpose(2, 3))
        if group.mask is not None:
            scores += group.mask
        out = torch.matmul(scores.softmax(-1), v)
    if n == 1:
        return out.reshape(r, -1, head_dim)
    return out.view(r, heads, n, -1, head_dim).transpose(1, 2).reshape(r * n, -1, head_dim)
