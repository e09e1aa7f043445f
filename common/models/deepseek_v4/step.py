"""The rows of one forward, and where in the cache each of them finds what it may see.

Worked out once and shared by all layers. Knows positions and block tables, no weights and no
states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.models.deepseek_v4.cache import DeepseekV4Cache
from common.models.deepseek_v4.config import Compression
from common.models.deepseek_v4.rotation import Rotaries, Rotation
from common.nn.attention import AttentionBatch, Segment

Places = tuple[Tensor, Tensor]  # indices [T, K] int64, and which of them are real [T, K] bool


@dataclass(frozen=True)
class Closing:
    """Entries whose last token is among the rows of a step."""

    rows: Tensor  # [n] the rows that close them
    places: Tensor  # [n] where their entries go, counted from entry 0 of block 0
    raw_slots: Tensor  # [n, span] slots of the tokens pooled, oldest first
    exists: Tensor  # [n, span] bool: False before position 0
    turn: Rotation  # of the entries' first tokens
    closes: Tensor  # [n] bool: False for rows that pool only to keep shapes the same


@dataclass
class Step:
    """T rows of several requests. Each sees its own past and itself, nothing of others."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    segment_of: Tensor  # [T] which table a row belongs to
    tables: Tensor  # [S, blocks], short ones padded with 0; [S, 0] without entries
    recent: Tensor  # [S, pages] pages of the newest blocks, short ones padded with 0
    recent_start: Tensor  # [S] the first position in them
    segments: Sequence[Segment]
    kv_block_size: int
    apart: bool  # rows must not influence each other's rounding
    rotaries: Rotaries
    turn: Rotation  # of the rows, in layers without compression
    compress_turn: Rotation  # of the rows, in compressed layers
    slots: Tensor = field(init=False)  # [T] where the rows' own window and raw rows go
    _windows: dict[int, Places] = field(default_factory=dict, repr=False)
    _closings: dict[Compression, Closing] = field(default_factory=dict, repr=False)
    _visible: dict[int, Places] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.slots = self.slots_at(self.all_rows(), self.positions[:, None]).squeeze(1)

    def entry_place(self, rows: Tensor, entries: Tensor, rate: int) -> Tensor:
        """Where entries [n, K] of the requests of rows [n] lie, from entry 0 of block 0 on."""
        per_block = self.kv_block_size // rate
        blocks = self.tables[self.segment_of[rows][:, None], entries // per_block]
        return blocks * per_block + entries % per_block

    def slots_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of recent positions [n, K] of the requests of rows [n]."""
        own, size = self.segment_of[rows][:, None], self.kv_block_size
        pages = self.recent[own, (positions - self.recent_start[own]) // size]
        return pages * size + positions % size

    def all_rows(self) -> Tensor:
        """[T] 0, 1, ..."""
        return torch.arange(self.positions.shape[0], device=self.positions.device)

    def window(self, size: int) -> Places:
        """Slots of the `size` newest positions that each row sees, oldest first."""
        if size not in self._windows:
            back = torch.arange(size - 1, -1, -1, device=self.positions.device)
            positions = self.positions[:, None] - back
            exists = positions >= 0
            slots = self.slots_at(self.all_rows(), positions.clamp(min=0))
            self._windows[size] = slots, exists
        return self._windows[size]

    def num_visible(self, rate: int) -> Tensor:
        """Entries that each row sees [T]: those closed by it or before it."""
        return (self.positions + 1) // rate

    def max_visible(self, rate: int) -> int:
        """The most entries that any row sees."""
        return max(segment.context_len for segment in self.segments) // rate

    def visible(self, rate: int) -> Places:
        """Places of all entries that each row sees, oldest first."""
        if rate not in self._visible:
            count = self.num_visible(rate)
            entries = torch.arange(self.max_visible(rate), device=count.device)
            entries = entries.expand(len(count), -1)
            self._visible[rate] = self.entry_places(entries, entries < count[:, None], rate)
        return self._visible[rate]

    def entry_places(self, entries: Tensor, exists: Tensor, rate: int) -> Places:
        """entries [T, K]: the entry numbers that each row wants."""
        return self.entry_place(self.all_rows(), entries.where(exists, 0), rate), exists

    def closing(self, compression: Compression) -> Closing:
        """What to pool. Rows that are kept apart all pool, so that shapes do not vary."""
        if compression not in self._closings:
            rate, span = compression.rate, compression.span
            rows, closes = self.all_rows(), (self.positions + 1) % rate == 0
            if not self.apart:
                rows, closes = rows[closes], closes[closes]
            ends = self.positions[rows]
            entries = ends // rate
            pooled = ends[:, None] - torch.arange(span - 1, -1, -1, device=ends.device)
            self._closings[compression] = Closing(
                rows=rows,
                places=self.entry_place(rows, entries[:, None], rate).squeeze(1),
                raw_slots=self.slots_at(rows, pooled.clamp(min=0)),
                exists=pooled >= 0,
                turn=self.rotaries.compressed(entries * rate),
                closes=closes,
            )
        return self._closings[compression]


def step_of(
    token_ids: Tensor,
    batch: AttentionBatch,
    kv: DeepseekV4Cache,
    rotaries: Rotaries,
    apart: bool = False,
    kind: type[Step] = Step,
) -> Step:
    """The step that `batch` describes; its slots follow from positions and tables."""
    device, size, segments = batch.positions.device, kv.kv_block_size, batch.segments
    counts = torch.tensor([segment.num_query for segment in segments], device=device)
    # Entries alone may lie anywhere in a table; all else is in its newest blocks.
    has_entries = any(state.compression for state in kv.layers)
    used = [
        segment.block_table[: -(-segment.context_len // size)] if has_entries else ()
        for segment in segments
    ]
    firsts, pages = zip(*map(kv.recent_places, segments), strict=True)
    return kind(
        token_ids=token_ids,
        positions=batch.positions,
        segment_of=torch.arange(len(counts), device=device).repeat_interleave(counts),
        tables=_padded(used, device),
        recent=_padded(pages, device),
        recent_start=torch.tensor(firsts, device=device) * size,
        segments=segments,
        kv_block_size=kv.kv_block_size,
        apart=apart,
        rotaries=rotaries,
        turn=rotaries.plain(batch.positions),
        compress_turn=rotaries.compressed(batch.positions),
    )


def _padded(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    length = max(map(len, tables))
    rows = [[*table, *[0] * (length - len(table))] for table in tables]
    return torch.tensor(rows, dtype=torch.int64, device=device)
