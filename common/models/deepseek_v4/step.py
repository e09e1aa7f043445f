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
    slots: Tensor  # [T]
    positions: Tensor  # [T]
    segment_of: Tensor  # [T] which table a row belongs to
    tables: Tensor  # [S, blocks], short ones padded with block 0
    segments: Sequence[Segment]
    kv_block_size: int
    apart: bool  # rows must not influence each other's rounding
    rotaries: Rotaries
    turn: Rotation  # of the rows, in layers without compression
    compress_turn: Rotation  # of the rows, in compressed layers
    _windows: dict[int, Places] = field(default_factory=dict, repr=False)
    _closings: dict[Compression, Closing] = field(default_factory=dict, repr=False)
    _visible: dict[int, Places] = field(default_factory=dict, repr=False)

    def place(self, rows: Tensor, indices: Tensor, per_block: int) -> Tensor:
        """Where items `indices` [n, K] of the requests of rows [n] lie, `per_block` a block."""
        blocks = self.tables[self.segment_of[rows]].gather(1, indices // per_block)
        return blocks * per_block + indices % per_block

    def all_rows(self) -> Tensor:
        """[T] 0, 1, ..."""
        return torch.arange(self.positions.shape[0], device=self.positions.device)

    def window(self, size: int) -> Places:
        """Slots of the `size` newest positions that each row sees, oldest first."""
        if size not in self._windows:
            back = torch.arange(size - 1, -1, -1, device=self.positions.device)
            positions = self.positions[:, None] - back
            exists = positions >= 0
            slots = self.place(self.all_rows(), positions.clamp(min=0), self.kv_block_size)
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
        per_block = self.kv_block_size // rate
        return self.place(self.all_rows(), entries.where(exists, 0), per_block), exists

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
                places=self.place(rows, entries[:, None], self.kv_block_size // rate).squeeze(1),
                raw_slots=self.place(rows, pooled.clamp(min=0), self.kv_block_size),
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
) -> Step:
    """The step that `batch` describes."""
    device = batch.positions.device
    counts = torch.tensor([segment.num_query for segment in batch.segments], device=device)
    length = max(-(-segment.context_len // kv.kv_block_size) for segment in batch.segments)
    tables = torch.tensor(
        [
            [*segment.block_table[:length], *[0] * (length - len(segment.block_table))]
            for segment in batch.segments
        ],
        device=device,
    )
    return Step(
        token_ids=token_ids,
        slots=batch.slots,
        positions=batch.positions,
        segment_of=torch.arange(len(counts), device=device).repeat_interleave(counts),
        tables=tables,
        segments=batch.segments,
        kv_block_size=kv.kv_block_size,
        apart=apart,
        rotaries=rotaries,
        turn=rotaries.plain(batch.positions),
        compress_turn=rotaries.compressed(batch.positions),
    )
