"""What batch-invariant numerics of all targets share: slices of one size, and the check at load.

Every kernel then sees the same shapes always. Whether it also rounds a row alike at every place of
a slice is up to the machine, so a loaded target is asked. Knows no family.
"""

import torch
from torch import Tensor

from common.errors import StartupError
from common.models.interfaces import Target
from common.nn.attention import AttentionBatch, Segment

SLICE = 8  # rows of a batch-invariant slice: holds an anchor and a block of seven drafts


def rows_of(segment: Segment) -> list[Segment]:
    """One segment per row, each with the keys that row sees."""
    last = segment.num_query - 1
    return [
        Segment(segment.query_start + i, 1, segment.context_len - (last - i), segment.block_table)
        for i in range(segment.num_query)
    ]


def check_invariance(target: Target, dtype: torch.dtype, *, has_head: bool = True) -> None:
    """Runs one slice twice, its rows at other places. Raises StartupError if a result differs.

    has_head: whether `logits` works here; with several ranks, all of them call this at once.
    """
    size = target.config.kv_block_multiple
    kv = target.new_kv(SLICE, size)
    token_ids = torch.arange(SLICE, device=target.device) % target.config.vocab_size
    segments = [Segment(i, 1, 1, (i,)) for i in range(SLICE)]
    slots, positions = size * torch.arange(SLICE, device=target.device), torch.zeros_like(token_ids)

    def run(ids: Tensor) -> list[Tensor]:
        hidden, _ = target.forward(ids, kv, AttentionBatch(segments, slots, positions))
        return [hidden, target.logits(hidden)] if has_head else [hidden]

    turned = (x.roll(-3, 0) for x in run(token_ids.roll(3)))
    if not all(torch.equal(a, b) for a, b in zip(run(token_ids), turned, strict=True)):
        raise StartupError(
            "batch-invariant numerics cannot be kept here: on this machine a kernel rounds a row "
            f"by its place among {SLICE} rows ({dtype}, {target.device}); start without "
            "batch-invariant numerics"
        )
