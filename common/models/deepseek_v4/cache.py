"""The state of V4 requests, every row of it addressed by absolute position through the block table.

Position p has one window row per layer and, in compressed layers, one raw compressor row; entry w,
which stands for the `rate` tokens from w * rate, has one row (and an index key in overlapping
layers). A block of `kv_block_size` positions holds all of them for its positions. So rolling a
request back is setting its length back: whatever lies past it is overwritten before anything sees
it. Nothing is ever cleared.

Entries last as long as their request, but nobody looks at a window or raw row again once the
request is a window and a group further. They are nearly all of the memory, so a cache may keep
them for fewer blocks than it has (`RecentBlocks`).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from common.errors import StartupError
from common.models.deepseek_v4.config import Compression, DeepseekV4Config
from common.nn.attention import Segment


class RecentBlocks:
    """Which blocks have room for window and raw rows, and where: block -> page of `num_pages`."""

    def __init__(self, num_pages: int) -> None:
        self._page_of: dict[int, int] = {}
        self._free = list(range(num_pages - 1, -1, -1))

    def page(self, block: int) -> int:
        """The page of a block that is covered."""
        return self._page_of[block]

    def cover(self, blocks: Iterable[int]) -> None:
        """Gives a page to those that have none."""
        for block in blocks:
            if block not in self._page_of:
                assert self._free, (
                    f"no page left for block {block}, {len(self._page_of)} are taken; see "
                    "`recent_blocks_needed`, and `release` what ended requests held"
                )
                self._page_of[block] = self._free.pop()

    def release(self, blocks: Iterable[int]) -> None:
        """Takes the pages of those that have one."""
        self._free += [self._page_of.pop(block) for block in blocks if block in self._page_of]


class LayerState:
    """One layer's rows. `rows`: window rows by slot, then entries, for the attention to gather."""

    def __init__(
        self,
        config: DeepseekV4Config,
        compression: Compression | None,
        num_blocks: int,
        num_pages: int,
        kv_block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.compression = compression
        self.num_slots = num_pages * kv_block_size
        self.entries_per_block = kv_block_size // compression.rate if compression else 0
        num_entries = num_blocks * self.entries_per_block

        def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        def raw(width: int) -> Tensor:
            return zeros(self.num_slots, 2, width, of=torch.float32)

        self.rows = zeros(self.num_slots + num_entries, config.head_dim)
        self.raw: Tensor | None = None  # [num_slots, value and gate, channels]
        self.index_raw: Tensor | None = None
        self.index_keys: Tensor | None = None  # [num_entries, index_head_dim]
        if compression:
            halves = 2 if compression.overlap else 1
            self.raw = raw(halves * config.head_dim)
            if compression.overlap:
                self.index_raw = raw(halves * config.index_head_dim)
                self.index_keys = zeros(num_entries, config.index_head_dim)

    @property
    def num_bytes(self) -> int:
        """Size of the layer's state."""
        tensors = (self.rows, self.raw, self.index_raw, self.index_keys)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class DeepseekV4Cache:
    """The state of all layers and requests; a slot is a position's place, as in PagedKV."""

    def __init__(
        self,
        config: DeepseekV4Config,
        compressions: Sequence[Compression | None],
        reach: int,
        num_blocks: int,
        kv_block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_recent_blocks: int | None = None,
    ) -> None:
        """reach: how many positions back from its own a row looks at window and raw rows.
        num_recent_blocks: blocks with room for window and raw rows; None: all of them.

        Whoever gives a number also calls `prepare` before and `settle` after every forward, and
        `release` for blocks that requests give back. Raises
        StartupError if a block would hold a fraction of an entry.
        """
        uneven = {c.rate for c in compressions if c and kv_block_size % c.rate}
        if uneven:
            raise StartupError(
                f"kv_block_size {kv_block_size} must be a multiple of the compression rates of "
                f"this model; {sorted(uneven)} do not divide it; take a multiple of {max(uneven)}"
            )
        self.num_blocks, self.kv_block_size = num_blocks, kv_block_size
        self.dtype, self.device = dtype, torch.device(device)
        self._reach = reach
        self._recent = None if num_recent_blocks is None else RecentBlocks(num_recent_blocks)
        num_pages = num_blocks if num_recent_blocks is None else num_recent_blocks
        self.num_slots = num_pages * kv_block_size  # window rows; whatever else a position leaves
        self.layers = [
            LayerState(config, compression, num_blocks, num_pages, kv_block_size, dtype, device)
            for compression in compressions
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the whole cache."""
        return sum(layer.num_bytes for layer in self.layers)

    def prepare(self, segments: Sequence[Segment]) -> None:
        """Makes room for the rows of one forward."""
        if self._recent is not None:
            for segment in segments:
                first, stop = self._recent_range(segment)
                self._recent.cover(segment.block_table[first:stop])

    def settle(self, segments: Sequence[Segment]) -> None:
        """After the forward: gives up the room that no later row of these requests needs.

        From here on a request may be set back by up to kv_block_size positions, or to 0.
        """
        if self._recent is None:
            return
        for segment in segments:
            first, _ = self._recent_range(segment)
            keep = self._first_recent(segment.context_len - self.kv_block_size)
            # Earlier forwards gave up all before `first` but the block for setting back.
            self._recent.release(segment.block_table[max(0, first - 1) : keep])

    def release(self, block_ids: Iterable[int]) -> None:
        """Blocks that no request holds any more."""
        if self._recent is not None:
            self._recent.release(block_ids)

    def recent_places(self, segment: Segment) -> tuple[int, list[int]]:
        """First place of the block table that `segment` still looks at, and pages from there."""
        first, stop = self._recent_range(segment)
        blocks = list(segment.block_table[first:stop])
        return first, blocks if self._recent is None else [self._recent.page(b) for b in blocks]

    def _recent_range(self, segment: Segment) -> tuple[int, int]:
        """Places of the block table whose window and raw rows the segment's rows see or write."""
        stop = -(-segment.context_len // self.kv_block_size)
        return self._first_recent(segment.context_len - segment.num_query), stop

    def _first_recent(self, start: int) -> int:
        return max(0, start - self._reach) // self.kv_block_size

    def slots_of(self, block_table: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of positions [start, stop), which must have room for window rows."""
        size = self.kv_block_size
        blocks = block_table[start // size : -(-stop // size)]
        pages = blocks if self._recent is None else [self._recent.page(block) for block in blocks]
        first = start // size
        return [pages[p // size - first] * size + p % size for p in range(start, stop)]


def target_reach(config: DeepseekV4Config) -> int:
    """How many positions back from its own a row of the target looks at window and raw rows."""
    return max(config.sliding_window, *(c.span for c in config.compressions if c), 1) - 1


def recent_blocks_needed(
    config: DeepseekV4Config, kv_block_size: int, max_requests: int, max_batch_tokens: int
) -> int:
    """`num_recent_blocks` that always suffices for so many live requests and rows per forward."""
    # A request holds its last block_size + reach positions and the n rows of the forward. L
    # positions touch at most (L - 2) // block_size + 2 blocks: (reach + n - 2) // block_size + 3.
    per_request = (target_reach(config) - 1) // kv_block_size + 4
    return max_requests * per_request + max_batch_tokens // kv_block_size
