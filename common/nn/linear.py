"""A bias-optional linear layer on 2-D activations, packed once for the device it runs on.

On CPU the weight is reordered for oneDNN at load: at the memory-bound widths of decoding that
halves the time of `F.linear`, which reorders on every call. Elsewhere it is `F.linear`. Knows no
model; gradients are not supported.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN costs about 10 us a call: from how many weights on it pays. Measured on AVX-512 CPUs.
PACKED_FROM = {torch.bfloat16: 1 << 14, torch.float32: 1 << 16}
# Rows per call that the packed layout is chosen for; the layout serves every width equally well,
# only a hint of 1 picks a different (slower, differently rounding) one in float32.
PACKED_FOR_ROWS = 8


class Linear:
    """y = x @ weight.T + bias. weight: [out, in]; x: [rows, in], contiguous."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias, self._weight = bias, weight.contiguous()
        # A torch built without oneDNN lacks the operator, so it is looked up only where it is used.
        self._packed_product = None
        if (
            weight.device.type == "cpu"
            and torch.backends.mkldnn.is_available()
            and weight.numel() >= PACKED_FROM.get(weight.dtype, weight.numel() + 1)
        ):
            self._packed_product = torch.ops.mkldnn._linear_pointwise.default
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._packed_product is None:
            return F.linear(x, self._weight, self._bias)
        return self._packed_product(x, self._weight, self._bias, "none", _NO_SCALARS, "")


_NO_SCALARS: list[float | None] = []
