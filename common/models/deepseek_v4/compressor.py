"""Condenses groups of tokens into entries: CSA (overlapping groups of 4) and HCA (groups of 128).

Every token leaves a raw row (value, gate) at its own position; whoever closes a group pools the raw
rows of that group, and in overlapping layers of the group before. So an entry depends on positions
only, not on how the tokens were cut into steps. Float32 up to the norm. Knows no queries.
"""

import torch
from torch import Tensor

from common.models.deepseek_v4.config import Compression, DeepseekV4Config
from common.models.deepseek_v4.rotation import rotate
from common.models.deepseek_v4.step import Step
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.nn.linear import Linear


class Compressor:
    """One compressor; a CSA layer has a second, smaller one for its index keys."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: DeepseekV4Weights,
        prefix: str,
        compression: Compression,
        width: int,
    ) -> None:
        """prefix: e.g. `model.layers.2.attn.compressor.`; width: channels of an entry."""
        self.compression, self.width, self.dtype = compression, width, weights.dtype
        channels = width * (2 if compression.overlap else 1)
        shape = (channels, config.hidden_size)
        value = weights.float32(f"{prefix}wkv.weight", shape)
        gate = weights.float32(f"{prefix}wgate.weight", shape)
        self.project = Linear(torch.cat([value, gate]))
        self.gate_bias = weights.float32(f"{prefix}ape", (compression.rate, channels))
        self.norm = weights.norm(f"{prefix}norm", width)

    def update(self, x: Tensor, step: Step, raw: Tensor, entries: Tensor) -> None:
        """Writes the raw rows of x [T, d] and every entry [width] that they close."""
        value, gate = self.project(x.float()).chunk(2, dim=1)
        gate = gate + self.gate_bias[step.positions % self.compression.rate]
        raw.index_copy_(0, step.slots, torch.stack([value, gate], dim=1))
        closing = step.closing(self.compression)
        if not closing.rows.numel():
            return
        value, gate = self._pooled_rows(raw[closing.raw_slots])
        gate = gate.masked_fill(~closing.exists[:, :, None], -torch.inf)
        entry = self.norm((value * gate.softmax(1)).sum(1).to(self.dtype))
        entry = rotate(entry[:, None], closing.turn).squeeze(1)
        entries.index_copy_(0, closing.places[closing.closes], entry[closing.closes])

    def _pooled_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [n, span, 2, channels] -> values and gates [n, span, width].

        With overlap, the older group enters with the first half of its channels, the newer one with
        the second.
        """
        if self.compression.overlap:
            older, newer = rows.split(self.compression.rate, dim=1)
            rows = torch.cat([older[..., : self.width], newer[..., self.width :]], dim=1)
        value, gate = rows.unbind(2)
        return value, gate
