"""Keys and values of all layers in fixed-size blocks, addressed by slot.

Position p of a sequence lies in slot `block_table[p // kv_block_size] * kv_block_size + p %
kv_block_size`. Which blocks belong to whom is the caller's business; nothing is ever cleared.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class PagedKV:
    """`k[layer]`, `v[layer]`: [num_slots, num_kv_heads, head_dim], views of one row per slot.

    A slot's keys and values of one layer lie side by side, so that a gather fetches both at once.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers, self.num_blocks, self.kv_block_size = num_layers, num_blocks, kv_block_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.num_slots = num_blocks * kv_block_size
        shape = (num_layers, self.num_slots, 2 * num_kv_heads, head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.rows: list[Tensor] = list(
            self._data
        )  # per layer [num_slots, 2 * num_kv_heads, head_dim]
        self.k: list[Tensor] = [rows[:, :num_kv_heads] for rows in self.rows]
        self.v: list[Tensor] = [rows[:, num_kv_heads:] for rows in self.rows]
        # The same memory as kernels take it: [1, num_kv_heads, num_slots, head_dim].
        self.k_heads: list[Tensor] = [k.transpose(0, 1).unsqueeze(0) for k in self.k]
        self.v_heads: list[Tensor] = [v.transpose(0, 1).unsqueeze(0) for v in self.v]

    @property
    def num_bytes(self) -> int:
        """Size of the whole cache."""
        return self._data.numel() * self._data.element_size()

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._data.dtype

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self._data.device

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores rows of k and v, [>= T, num_kv_heads, head_dim], in slots [T] int64.

        Rows past T are padding.
        """
        num_rows = slots.shape[0]
        self.k[layer].index_copy_(0, slots, k[:num_rows])
        self.v[layer].index_copy_(0, slots, v[:num_rows])

    def write_layers(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores rows of all layers: k, v [T, layers, kv heads, head_dim] in slots [T] int64."""
        heads = self.num_kv_heads
        self._data[:, :, :heads].index_copy_(1, slots, k.transpose(0, 1))
        self._data[:, :, heads:].index_copy_(1, slots, v.transpose(0, 1))

    def prepare(self, segments: Sequence[object]) -> None:
        """Nothing to do: every slot has its room."""

    def settle(self, segments: Sequence[object]) -> None:
        """Nothing to do."""

    def release(self, block_ids: Iterable[int]) -> None:
        """Nothing to do: what a block holds is overwritten."""

    def slots_of(self, block_table: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of positions [start, stop)."""
        size = self.kv_block_size
        return [block_table[p // size] * size + p % size for p in range(start, stop)]
