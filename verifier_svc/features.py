"""Feature rows of every position that has KV, kept on the device under the same slot numbers.

So any row of any live request can be sent at any time: prompt rows by chunk, new rows by round, or
all of them again to a drafter that restarted. Knows no drafter and no wire message.
"""

from collections.abc import Callable

import torch

from common.tensors import DTYPES, to_bytes
from verifier_svc.request import Request

Projection = Callable[[torch.Tensor], torch.Tensor]  # [T, num_taps * d] -> [T, width]


class FeatureStore:
    """[num_slots, width]. `project` maps taps to rows in the PROJECTED form; None keeps them raw.

    Without a drafter nothing is tapped and width is 0.
    """

    def __init__(
        self,
        num_slots: int,
        width: int,
        kv_block_size: int,
        *,
        dtype: str = "bf16",
        device: torch.device | str = "cpu",
        project: Projection | None = None,
    ) -> None:
        self.width = width
        self.wire_dtype = dtype
        self._kv_block_size = kv_block_size
        self._project = project
        self._rows = torch.zeros(num_slots, width, dtype=DTYPES[dtype], device=device)

    def write(self, slots: torch.Tensor, taps: torch.Tensor) -> None:
        """slots: [T] int64; taps: [T, num_taps * d] as the target returns them."""
        rows = taps if self._project is None else self._project(taps)
        self._rows.index_copy_(0, slots, rows.to(self._rows.dtype))

    def read(self, spans: list[tuple[Request, int, int]]) -> bytes:
        """Rows of positions [start, stop) of each request, concatenated, in the wire dtype."""
        size = self._kv_block_size
        slots = [
            request.block_table[position // size] * size + position % size
            for request, start, stop in spans
            for position in range(start, stop)
        ]
        index = torch.tensor(slots, dtype=torch.int64, device=self._rows.device)
        return to_bytes(self._rows.index_select(0, index), self.wire_dtype)
