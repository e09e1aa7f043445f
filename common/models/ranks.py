"""One model on several ranks: rank 0's is asked, and has the others compute the same.

`LeadingTarget` and `LeadingDrafter` stand before rank 0's model; whoever calls them sees a model
like any other. Before each computation they send what the other ranks need to do it too: token ids,
places, block tables. `follow_target` and `follow_drafter` are those ranks' life. A cache exists on
every rank and lives through the same steps in the same order, so its rows lie in the same places.
Knows no family and no request.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from common.models.interfaces import (
    DrafterFacts,
    DraftModel,
    KVCache,
    Projection,
    Target,
    TargetFacts,
)
from common.nn.attention import AttentionBatch, Segment
from common.nn.vocab_head import Midway
from common.parallel import Parallel


class Order(IntEnum):
    """What the other ranks are to do; the first value of a message."""

    NEW_KV = 1
    FORWARD = 2
    INGEST = 3
    BLOCK = 4


class _Writer:
    """A message: numbers, and lists that say their length."""

    def __init__(self, order: Order, *numbers: int) -> None:
        self.values = array("q", (order, *numbers))

    def numbers(self, numbers: Sequence[int]) -> None:
        self.values.append(len(numbers))
        self.values.extend(numbers)

    def segments(self, segments: Sequence[Segment], kv_block_size: int) -> None:
        self.values.append(len(segments))
        for s in segments:
            self.values.extend((s.query_start, s.num_query, s.context_len))
            self.numbers(s.block_table[: -(-s.context_len // kv_block_size)])


class _Reader:
    def __init__(self, values: list[int]) -> None:
        self._values, self._at = values, 0

    def number(self) -> int:
        self._at += 1
        return self._values[self._at - 1]

    def numbers(self) -> list[int]:
        count = self.number()
        self._at += count
        return self._values[self._at - count : self._at]

    def segments(self) -> list[Segment]:
        return [
            Segment(self.number(), self.number(), self.number(), self.numbers())
            for _ in range(self.number())
        ]


class LeadingKV:
    """Rank 0's cache. What is released here is released elsewhere before the next forward."""

    def __init__(self, own: KVCache) -> None:
        self.own = own
        self._released: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Blocks."""
        return self.own.num_blocks

    @property
    def kv_block_size(self) -> int:
        """Tokens per block."""
        return self.own.kv_block_size

    @property
    def num_slots(self) -> int:
        """Places for what a position leaves behind."""
        return self.own.num_slots

    @property
    def num_bytes(self) -> int:
        """Size on this rank, and on each of the others."""
        return self.own.num_bytes

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.own.device

    def prepare(self, segments: Sequence[Segment]) -> None:
        """See KVCache."""
        self.own.prepare(segments)

    def settle(self, segments: Sequence[Segment]) -> None:
        """See KVCache."""
        self.own.settle(segments)

    def release(self, block_ids: Iterable[int]) -> None:
        """See KVCache."""
        block_ids = list(block_ids)
        self.own.release(block_ids)
        self._released += block_ids

    def slots_of(self, block_table: Sequence[int], start: int, stop: int) -> list[int]:
        """See KVCache."""
        return self.own.slots_of(block_table, start, stop)

    def take_released(self) -> list[int]:
        """Blocks released since the last call."""
        released, self._released = self._released, []
        return released


class LeadingTarget:
    """The target as rank 0's services see it."""

    def __init__(self, own: Target, parallel: Parallel) -> None:
        self._own, self._parallel = own, parallel

    @property
    def config(self) -> TargetFacts:
        """The whole model's."""
        return self._own.config

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self._own.device

    def num_recent_blocks(
        self, kv_block_size: int, max_requests: int, max_batch_tokens: int
    ) -> int | None:
        """See Target."""
        return self._own.num_recent_blocks(kv_block_size, max_requests, max_batch_tokens)

    def new_kv(
        self,
        num_blocks: int,
        kv_block_size: int,
        num_recent_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """See Target. Each rank makes one; the newest is the one that forwards run on."""
        own = self._own.new_kv(num_blocks, kv_block_size, num_recent_blocks, device)
        if own.device.type == "meta":
            return own
        recent = -1 if num_recent_blocks is None else num_recent_blocks
        self._parallel.send(_Writer(Order.NEW_KV, num_blocks, kv_block_size, recent).values)
        return LeadingKV(own)

    def forward(
        self, token_ids: Tensor, kv: LeadingKV, batch: AttentionBatch, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """See Target."""
        order = _Writer(Order.FORWARD)
        order.numbers(kv.take_released())
        order.numbers(token_ids.tolist())
        order.segments(batch.segments, kv.kv_block_size)
        self._parallel.send(order.values)
        return self._own.forward(token_ids, kv.own, batch, taps)

    def logits(self, hidden: Tensor, midway: Midway | None = None) -> Tensor:
        """See Target; rank 0 needs no other rank for it."""
        return self._own.logits(hidden, midway)


@torch.inference_mode()
def follow_target(own: Target, parallel: Parallel) -> None:
    """What another rank's target does until rank 0 stops. Raises RankLost."""
    kv: KVCache | None = None
    for message in _messages(parallel):
        if message.number() == Order.NEW_KV:
            kv = own.new_kv(message.number(), message.number(), _recent(message.number()))
            continue
        assert kv is not None, "a forward before a cache"
        kv.release(message.numbers())
        token_ids = _ids(message.numbers(), own.device)
        segments = message.segments()
        kv.prepare(segments)
        slots: list[int] = []
        positions: list[int] = []
        for s in segments:
            rows = range(s.context_len - s.num_query, s.context_len)
            slots += kv.slots_of(s.block_table, rows.start, rows.stop)
            positions += rows
        batch = AttentionBatch(segments, _ids(slots, own.device), _ids(positions, own.device))
        own.forward(token_ids, kv, batch)
        kv.settle(segments)


class LeadingDrafter:
    """The drafter as rank 0's service sees it; what is not a stage runs here alone."""

    def __init__(self, own: DraftModel, parallel: Parallel) -> None:
        self._own, self._parallel = own, parallel

    @property
    def config(self) -> DrafterFacts:
        """The whole drafter's."""
        return self._own.config

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self._own.dtype

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self._own.device

    @property
    def project(self) -> Projection:
        """See DraftModel."""
        return self._own.project

    def new_kv(self, num_blocks: int, kv_block_size: int) -> KVCache:
        """See DraftModel. Each rank makes one; the newest is the one that is used."""
        self._parallel.send(_Writer(Order.NEW_KV, num_blocks, kv_block_size).values)
        return self._own.new_kv(num_blocks, kv_block_size)

    def ingest(self, projected: Tensor, kv: Any, slots: Tensor, positions: Tensor) -> None:
        """See DraftModel."""
        order = _Writer(Order.INGEST, *projected.shape)
        order.numbers(slots.tolist())
        order.numbers(positions.tolist())
        self._parallel.send(order.values)
        self._own.ingest(self._parallel.share(projected.contiguous()), kv, slots, positions)

    def block(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        num_drafts: int,
        kv: Any,
        block_tables: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """See DraftModel."""
        order = _Writer(Order.BLOCK, num_drafts)
        order.numbers(anchor_ids.tolist())
        order.numbers(anchor_positions.tolist())
        for table in block_tables:
            order.numbers(table)
        self._parallel.send(order.values)
        return self._own.block(anchor_ids, anchor_positions, num_drafts, kv, block_tables)

    def start_state(self, num_requests: int) -> Any:
        """See DraftModel."""
        return self._own.start_state(num_requests)

    def bias(
        self, prev_target_ids: Tensor, hidden: Tensor, state: Any
    ) -> tuple[Tensor | None, Any]:
        """See DraftModel."""
        return self._own.bias(prev_target_ids, hidden, state)

    def confidence(self, hidden: Tensor, prev_target_ids: Tensor) -> Tensor | None:
        """See DraftModel."""
        return self._own.confidence(hidden, prev_target_ids)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """See DraftModel."""
        return self._own.to_target_ids(draft_ids)


@torch.inference_mode()
def follow_drafter(own: DraftModel, parallel: Parallel) -> None:
    """What another rank's drafter does until rank 0 stops. Raises RankLost."""
    kv: KVCache | None = None
    for message in _messages(parallel):
        order = message.number()
        if order == Order.NEW_KV:
            kv = own.new_kv(message.number(), message.number())
        elif order == Order.INGEST:
            shape = (message.number(), message.number())
            slots, positions = (_ids(message.numbers(), own.device) for _ in range(2))
            projected = torch.empty(shape, dtype=own.dtype, device=own.device)
            own.ingest(parallel.share(projected), kv, slots, positions)
        else:
            num_drafts = message.number()
            anchors, positions = (_ids(message.numbers(), own.device) for _ in range(2))
            tables = [message.numbers() for _ in range(len(anchors))]
            own.block(anchors, positions, num_drafts, kv, tables)


def _messages(parallel: Parallel) -> Iterator[_Reader]:
    """Until rank 0 stops."""
    while values := parallel.receive():
        yield _Reader(values)


def _recent(number: int) -> int | None:
    return None if number < 0 else number


def _ids(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
