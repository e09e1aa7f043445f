"""The state of V4 requests, every row of it addressed by absolute position through the block table.

Position p has one window row per layer and, in compressed layers, one raw compressor row; entry w,
which stands for the `rate` tokens from w * rate, has one row (and an index key in overlapping
layers). A block of `kv_block_size` positions holds all of them for its positions. So rolling a
request back is setting its length back: whatever lies past it is overwritten before anything sees
it. Nothing is ever cleared.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.errors import StartupError
from common.models.deepseek_v4.config import Compression, DeepseekV4Config


class LayerState:
    """One layer's rows. `rows`: window rows by slot, then entries, for the attention to gather."""

    def __init__(
        self,
        config: DeepseekV4Config,
        compression: Compression | None,
        num_blocks: int,
        kv_block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.compression = compression
        self.num_slots = num_blocks * kv_block_size
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
        num_blocks: int,
        kv_block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises StartupError if a block would hold a fraction of an entry."""
        uneven = {c.rate for c in compressions if c and kv_block_size % c.rate}
        if uneven:
            raise StartupError(
                f"kv_block_size {kv_block_size} must be a multiple of the compression rates of "
                f"this model; {sorted(uneven)} do not divide it; take a multiple of {max(uneven)}"
            )
        self.num_blocks, self.kv_block_size = num_blocks, kv_block_size
        self.num_slots = num_blocks * kv_block_size
        self.dtype, self.device = dtype, torch.device(device)
        self.layers = [
            LayerState(config, compression, num_blocks, kv_block_size, dtype, device)
            for compression in compressions
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the whole cache."""
        return sum(layer.num_bytes for layer in self.layers)

    def slots_of(self, block_table: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of positions [start, stop)."""
        size = self.kv_block_size
        return [block_table[p // size] * size + p % size for p in range(start, stop)]
