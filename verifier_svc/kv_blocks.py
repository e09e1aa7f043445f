"""Which block of the paged KV cache belongs to whom: allocate, give back, roll back.

Pure bookkeeping of integers; the tensors live in common/nn/paged_kv.py. Position p of a request lives
in slot `block_table[p // kv_block_size] * kv_block_size + p % kv_block_size`, where kv_block_size counts the
positions of one block.
"""

from collections.abc import Iterable

from verifier_svc.request import Request


class KVBlocks:
    """A free list. Invariant: every block is free or in exactly one block table."""

    def __init__(self, num_blocks: int, kv_block_size: int) -> None:
        assert num_blocks > 0 and kv_block_size > 0, (num_blocks, kv_block_size)
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the warmest block first

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold positions [0, num_positions)."""
        return -(-num_positions // self.kv_block_size)

    def room(self, request: Request) -> int:
        """Positions from 0 that `request` could have with its own and all free blocks."""
        return (len(request.block_table) + len(self._free)) * self.kv_block_size

    def grow(self, request: Request, num_positions: int) -> bool:
        """Makes the table cover [0, num_positions). False, and nothing changed, without room."""
        missing = self.blocks_for(num_positions) - len(request.block_table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            request.block_table.append(self._free.pop())
        return True

    def shrink(self, request: Request, num_positions: int) -> None:
        """Rolls back: whole blocks past [0, num_positions) are free again."""
        keep = self.blocks_for(num_positions)
        while len(request.block_table) > keep:
            self._free.append(request.block_table.pop())

    def check(self, holders: Iterable[Request]) -> None:
        """Asserts the invariant over all requests that hold blocks; for tests and crash reports."""
        held = [block for request in holders for block in request.block_table]
        owned = sorted(held + self._free)
        assert owned == list(range(self.num_blocks)), (sorted(held), sorted(self._free))
