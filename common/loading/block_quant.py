"""Block-quantised weights back to real numbers: fp8 e4m3, MXFP4 and NVFP4.

Formats as DeepSeek-V4 checkpoints store them: fp8 codes with one E8M0 scale per block of rows and
columns; fp4 (e2m1) codes two to a byte, low nibble first, with one E8M0 scale per 32 inputs (OCP
MX) or one e4m3 scale per 16 inputs and one float for the whole tensor (NVFP4). Strict: a dtype or
shape that does not fit is a LoadError naming the tensor. Knows no model and no file.
"""

import torch
from torch import Tensor

from common.errors import LoadError

MXFP4_GROUP = 32  # inputs per scale
NVFP4_GROUP = 16
# e2m1: sign, two exponent bits, one mantissa bit; code 8 is minus zero.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1, *(-value for value in _E2M1))


def dequantise_fp8(
    name: str,
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
) -> Tensor:
    """codes [out, in] e4m3, E8M0 scales of all blocks that they touch -> float32 [out, in].

    block: rows and columns that share a scale; the last block of an axis may be smaller. first:
    where in their first block the codes begin, as a slice of a larger matrix need not start on a
    border.
    """
    _check(name, codes, torch.float8_e4m3fn)
    rows, cols = (start + size for start, size in zip(first, codes.shape, strict=True))
    factors = _e8m0(name, scales, (-(-rows // block[0]), -(-cols // block[1])))
    factors = factors.repeat_interleave(block[0], 0)[first[0] : rows]
    return codes.float() * factors.repeat_interleave(block[1], 1)[:, first[1] : cols]


def dequantise_mxfp4(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """codes [out, in / 2] bytes, scales [out, in / 32] E8M0 -> float32 [out, in]."""
    values = unpack_fp4(name, codes)
    rows, cols = values.shape
    return _times_groups(values, _e8m0(name, scales, (rows, cols // MXFP4_GROUP)), MXFP4_GROUP)


def dequantise_nvfp4(name: str, codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """codes [out, in / 2] bytes, scales [out, in / 16] e4m3, scale_2 [1] -> float32 [out, in]."""
    values = unpack_fp4(name, codes)
    rows, cols = values.shape
    _check(f"scales of {name}", scales, torch.float8_e4m3fn, (rows, cols // NVFP4_GROUP))
    if scale_2.dtype != torch.float32 or scale_2.numel() != 1:
        raise LoadError(
            f"the second scale of {name!r} is {_plain(scale_2.dtype)} {list(scale_2.shape)}; NVFP4 "
            "has one float32 per tensor"
        )
    return _times_groups(values, scales.float() * scale_2.reshape(()), NVFP4_GROUP)


def unpack_fp4(name: str, codes: Tensor) -> Tensor:
    """codes [out, n] int8 or uint8, element 2c in the low nibble of byte c -> float32 [out, 2n]."""
    if codes.dtype not in (torch.int8, torch.uint8) or codes.dim() != 2:
        raise LoadError(
            f"tensor {name!r} is {_plain(codes.dtype)} {list(codes.shape)}; packed fp4 is a matrix "
            "of bytes (I8 or U8)"
        )
    packed = codes.view(torch.uint8).long()
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    return table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)]


def _times_groups(values: Tensor, factors: Tensor, group: int) -> Tensor:
    return (values.unflatten(1, (-1, group)) * factors[:, :, None]).flatten(1)


def _e8m0(name: str, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Powers of two. The dtype's NaN (byte 255) would poison a whole block: refused."""
    _check(f"scales of {name}", scales, torch.float8_e8m0fnu, shape)
    factors = scales.float()
    if factors.isnan().any():
        raise LoadError(f"a scale of tensor {name!r} is NaN (E8M0 byte 255); download it again")
    return factors


def _check(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, int] | None = None
) -> None:
    fits = tensor.dim() == 2 if shape is None else tuple(tensor.shape) == shape
    if tensor.dtype != dtype or not fits:
        wanted = "a matrix" if shape is None else list(shape)
        raise LoadError(
            f"tensor {name!r} is {_plain(tensor.dtype)} {list(tensor.shape)}; {_plain(dtype)} "
            f"{wanted} is needed"
        )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
