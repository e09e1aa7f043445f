"""Which block of the paged KV cache belongs to whom: allocate, give back, roll back.

Pure bookkeeping of integers; the tensors live in common/nn/paged_kv.py. Position p of a request is
slot `block_table[p // kv_block_size] * kv_block_size + p % kv_block_size`.
"""

from collections.abc import Callable

from verifier_svc.request import Request


class KVBlocks:
    """Invariant: every block is free or in exactly one block table.

    Tables are kept contiguous where possible, because attention reads a contiguous run of slots in
    place and must gather a scattered one: a new table starts in the middle of the longest free run,
    which leaves both it and its neighbour room to grow.
    """

    def __init__(
        self,
        num_blocks: int,
        kv_block_size: int,
        released: Callable[[list[int]], None] = lambda block_ids: None,
    ) -> None:
        """`released` hears of blocks that became free, before anyone gets them again."""
        assert num_blocks > 0 and kv_block_size > 0, (num_blocks, kv_block_size)
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self.num_free = num_blocks
        self._released = released
        self._is_free = [True] * num_blocks + [False]  # a sentinel ends the last run

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold positions [0, num_positions)."""
        return -(-num_positions // self.kv_block_size)

    def room(self, request: Request) -> int:
        """Positions from 0 that `request` could hold with its own and all free blocks."""
        return (len(request.block_table) + self.num_free) * self.kv_block_size

    def grow(self, request: Request, num_positions: int) -> bool:
        """Makes the table cover [0, num_positions). False, and nothing changed, without room."""
        table = request.block_table
        missing = self.blocks_for(num_positions) - len(table)
        if missing > self.num_free:
            return False
        for left in range(missing, 0, -1):
            block = table[-1] + 1 if table else self.num_blocks
            if not self._is_free[block]:
                block = self._place(left)
            self._is_free[block] = False
            self.num_free -= 1
            table.append(block)
        return True

    def shrink(self, request: Request, num_positions: int) -> None:
        """Rolls back: whole blocks past [0, num_positions) are free again."""
        keep = self.blocks_for(num_positions)
        freed = request.block_table[keep:]
        if not freed:
            return
        del request.block_table[keep:]
        for block in freed:
            self._is_free[block] = True
        self.num_free += len(freed)
        self._released(freed)

    def _place(self, num_blocks: int) -> int:
        """Where a run of `num_blocks` does best: the longest free run, off its taken neighbour."""
        best_start, best_len, start = 0, 0, 0
        for block, is_free in enumerate(self._is_free):
            if not is_free:
                if block - start > best_len:
                    best_start, best_len = start, block - start
                start = block + 1
        if best_start == 0:
            return 0
        return best_start + max(0, min(best_len // 2, best_len - num_blocks))
