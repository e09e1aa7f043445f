"""Quantises weights into the formats that `common.loading.block_quant` reads: test checkpoints.

Scales are powers of two chosen so that nothing saturates; rounding is to the nearest code. The real
checkpoints were trained with such weights; here any weight will do.
"""

import torch
from torch import Tensor

from common.loading.block_quant import E2M1, MXFP4_GROUP

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0


def quantise_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes e4m3 [out, in], scales E8M0 [ceil(out / rows), ceil(in / cols)]."""
    (rows, cols), (high, wide) = weight.shape, block
    num_high, num_wide = -(-rows // high), -(-cols // wide)
    padded = weight.new_zeros(num_high * high, num_wide * wide)
    padded[:rows, :cols] = weight
    blocks = padded.view(num_high, high, num_wide, wide)
    scales = _power_of_two(blocks.abs().amax((1, 3)) / _E4M3_MAX)
    codes = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales.to(torch.float8_e8m0fnu)


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes int8 [out, in / 2], scales E8M0 [out, in / 32]."""
    groups = weight.unflatten(1, (-1, MXFP4_GROUP))
    scales = _power_of_two(groups.abs().amax(2) / _E2M1_MAX)
    scaled = (groups / scales[:, :, None]).flatten(1)
    # Code 8, minus zero, never wins: argmin takes the first of equals.
    codes = (scaled[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.view(torch.int8), scales.to(torch.float8_e8m0fnu)


def _power_of_two(smallest: Tensor) -> Tensor:
    """The least power of two that is not below `smallest`; 2^-100 for blocks of zeros."""
    return torch.exp2(smallest.clamp(min=2.0**-100).log2().ceil())
