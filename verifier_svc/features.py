"""Feature rows of every position whose rows the KV cache keeps, under the cache's own slots.

So any row that a drafter can attend to can be sent at any time: prompt rows by chunk, new rows by
round, or all of them again to a drafter that restarted. Knows no drafter and no wire message.
"""

import torch

from common.models.interfaces import KVCache, Projection
from common.tensors import DTYPES, to_bytes
from verifier_svc.request import Request


class FeatureStore:
    """[kv.num_slots, width]. `project` maps taps to rows in the PROJECTED form; None keeps them
    raw. Without a drafter nothing is tapped and width is 0.
    """

    def __init__(
        self,
        kv: KVCache,
        width: int,
        *,
        dtype: str = "bf16",
        project: Projection | None = None,
    ) -> None:
        self.width = width
        self.wire_dtype = dtype
        self._kv = kv
        self._project = project
        self._rows = torch.zeros(kv.num_slots, width, dtype=DTYPES[dtype], device=kv.device)

    @property
    def num_bytes(self) -> int:
        """Size of the store."""
        return self._rows.numel() * self._rows.element_size()

    def write(self, slots: torch.Tensor, taps: torch.Tensor) -> None:
        """slots: [T] int64; taps: [T, num_taps * d] as the target returns them."""
        rows = taps if self._project is None else self._project(taps)
        self._rows.index_copy_(0, slots, rows.to(self._rows.dtype))

    def read(self, spans: list[tuple[Request, int, int]]) -> bytes:
        """Rows of positions [start, stop) of each request, concatenated, in the wire dtype."""
        slots = [
            slot
            for request, start, stop in spans
            for slot in self._kv.slots_of(request.block_table, start, stop)
        ]
        index = torch.tensor(slots, dtype=torch.int64, device=self._rows.device)
        return to_bytes(self._rows.index_select(0, index), self.wire_dtype)
