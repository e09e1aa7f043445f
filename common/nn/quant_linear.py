"""A linear layer on 2-D activations whose weight stays in memory as the checkpoint stores it.

For CUDA: fp8 takes half and fp4 a quarter of bf16's memory, and decoding is bound by reading
weights. On CPU `Linear` with a dequantised weight is faster; here it runs the reference. Knows no
model.
"""

import torch
from torch import Tensor

from common.kernels.quant_matmul import quant_matmul
from common.loading.block_quant import QuantWeight

# The first NVIDIA GPUs that convert e4m3 (Ada, Hopper).
MIN_CAPABILITY = (8, 9)


def keeps_quantised(device: torch.device | str) -> bool:
    """Whether block-quantised weights stay as they are on `device`, or are dequantised at load."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


class QuantLinear:
    """y = x @ W.T. weight: one matrix [out, in]; x: [rows, in]."""

    def __init__(self, weight: QuantWeight) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return quant_matmul(x.contiguous(), self.weight)
