"""Block-quantised weights: fp8 e4m3, MXFP4 and NVFP4, checked, and back to real numbers.

Formats as DeepSeek-V4 checkpoints store them: fp8 codes with one E8M0 scale per block of rows and
columns; fp4 (e2m1) codes two to a byte, low nibble first, with one E8M0 scale per 32 inputs (OCP
MX) or one e4m3 scale per 16 inputs and one float for the whole tensor (NVFP4). Strict: a dtype or
shape that does not fit is a LoadError naming the tensor. Knows no model and no file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import LoadError

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
MXFP4_GROUP = 32  # inputs per scale
NVFP4_GROUP = 16
# e2m1: sign, two exponent bits, one mantissa bit; code 8 is minus zero.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
E4M3 = torch.arange(256, dtype=torch.uint8).view(FP8).float()


@dataclass(frozen=True)
class QuantWeight:
    """E matrices [N, K] as stored, E = 1 but for experts. All tensors contiguous, on one device.

    One form for all formats: scales belong to a row and `group` consecutive inputs of it, so that
    rows can be cut and stacked at will. What a block of 128 x 128 shares is repeated in each of its
    rows: one byte per 128.
    """

    codes: Tensor  # [E, N, K] e4m3, or [E, N, K / 2] uint8: two e2m1 codes each
    scales: Tensor  # [E, N, ceil(K / group)] E8M0 or e4m3
    group: int  # inputs that share a scale; a power of two
    row_factors: Tensor | None = None  # [E, N] float32; multiplies whole rows of W (NVFP4)

    def __post_init__(self) -> None:
        codes, scales, factors = self.codes, self.scales, self.row_factors
        said = f"codes {_told(codes)}, scales {_told(scales)}, group {self.group}"
        assert codes.dim() == 3 and codes.dtype in (FP8, torch.uint8), said
        assert self.group > 0 and self.group & (self.group - 1) == 0, said
        assert not self.packed or self.num_inputs % self.group == 0, said
        shape = (*codes.shape[:2], -(-self.num_inputs // self.group))
        assert scales.shape == shape and scales.dtype in (FP8, E8M0), f"{said}: needs {shape}"
        assert codes.is_contiguous() and scales.is_contiguous(), said
        if factors is not None:
            assert factors.shape == shape[:2] and factors.dtype == torch.float32, _told(factors)
            assert factors.is_contiguous(), _told(factors)

    @property
    def packed(self) -> bool:
        """Two codes to a byte."""
        return self.codes.dtype == torch.uint8

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.codes.shape[2] * (2 if self.packed else 1)

    @property
    def format(self) -> str:
        """What may be joined: fp8, mxfp4 or nvfp4, and the group."""
        name = "fp8" if not self.packed else "mxfp4" if self.scales.dtype == E8M0 else "nvfp4"
        return f"{name}/{self.group}"

    @property
    def num_bytes(self) -> int:
        """Memory of codes, scales and factors."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def to(self, device: torch.device | str) -> "QuantWeight":
        """The same on another device."""
        codes, scales, *factors = (tensor.to(device) for tensor in self._tensors())
        return QuantWeight(codes, scales, self.group, *factors)

    def dequantised(self, matrix: int = 0) -> Tensor:
        """One of the E matrices, float32 [N, K]."""
        codes = self.codes[matrix].view(torch.uint8)
        if self.packed:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        # Several times faster than torch's own conversion and than table[codes].
        table = (E2M1 if self.packed else E4M3).to(codes.device)
        values = table.index_select(0, codes.flatten().int()).view(codes.shape)
        factors = self.scales[matrix].float().repeat_interleave(self.group, 1)
        values = values * factors[:, : self.num_inputs]
        return values if self.row_factors is None else values * self.row_factors[matrix][:, None]

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.codes, self.scales, self.row_factors) if t is not None]


def joined(weights: Sequence[QuantWeight], axis: int) -> QuantWeight:
    """One weight of several of equal format. axis 0: more matrices, 1: more rows."""
    formats = {weight.format for weight in weights}
    assert len(formats) == 1, f"formats {sorted(formats)} cannot be joined"
    codes, scales, *factors = (
        torch.cat([part.view(torch.uint8) for part in parts], axis).view(parts[0].dtype)
        for parts in zip(*(weight._tensors() for weight in weights), strict=True)
    )
    return QuantWeight(codes, scales, weights[0].group, *factors)


def fp8_weight(
    name: str,
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
) -> QuantWeight:
    """codes [out, in] e4m3, E8M0 scales of all blocks that they touch.

    block: rows and columns that share a scale; the last block of an axis may be smaller. first:
    where in their first block the codes begin, as a slice of a larger matrix need not start on a
    border.
    """
    _check(name, codes, FP8)
    rows, cols = (start + size for start, size in zip(first, codes.shape, strict=True))
    _check_e8m0(name, scales, (-(-rows // block[0]), -(-cols // block[1])))
    # Groups may not straddle two blocks: the largest power of two that fits start and width.
    fits = math.gcd(first[1], block[1])
    group = fits & -fits
    row_blocks = torch.arange(first[0], rows) // block[0]
    col_blocks = torch.arange(first[1], cols, group) // block[1]
    repeated = scales.view(torch.uint8)[row_blocks[:, None], col_blocks].view(E8M0)
    return QuantWeight(codes.contiguous()[None], repeated[None], group)


def mxfp4_weight(name: str, codes: Tensor, scales: Tensor) -> QuantWeight:
    """codes [out, in / 2] bytes, scales [out, in / 32] E8M0."""
    packed = _packed(name, codes, MXFP4_GROUP)
    _check_e8m0(name, scales, (len(codes), 2 * codes.shape[1] // MXFP4_GROUP))
    return QuantWeight(packed[None], scales.contiguous()[None], MXFP4_GROUP)


def nvfp4_weight(name: str, codes: Tensor, scales: Tensor, scale_2: Tensor) -> QuantWeight:
    """codes [out, in / 2] bytes, scales [out, in / 16] e4m3, scale_2 [1]."""
    packed = _packed(name, codes, NVFP4_GROUP)
    _check(f"scales of {name}", scales, FP8, (len(codes), 2 * codes.shape[1] // NVFP4_GROUP))
    if scale_2.dtype != torch.float32 or scale_2.numel() != 1:
        raise LoadError(
            f"the second scale of {name!r} is {_told(scale_2)}; NVFP4 has one float32 per tensor"
        )
    factors = scale_2.reshape(1, 1).expand(1, len(codes)).contiguous()
    return QuantWeight(packed[None], scales.contiguous()[None], NVFP4_GROUP, factors)


def _packed(name: str, codes: Tensor, group: int) -> Tensor:
    """Bytes, as they are; torch calls them int8 or uint8."""
    if codes.dtype not in (torch.int8, torch.uint8) or codes.dim() != 2:
        raise LoadError(
            f"tensor {name!r} is {_told(codes)}; packed fp4 is a matrix of bytes (I8 or U8)"
        )
    if 2 * codes.shape[1] % group:
        raise LoadError(
            f"tensor {name!r} has {2 * codes.shape[1]} inputs; fp4 comes in groups of {group}"
        )
    return codes.view(torch.uint8).contiguous()


def _check_e8m0(name: str, scales: Tensor, shape: tuple[int, int]) -> None:
    """Powers of two. The dtype's NaN (byte 255) would poison a whole block: refused."""
    _check(f"scales of {name}", scales, E8M0, shape)
    if (scales.view(torch.uint8) == 255).any():
        raise LoadError(f"a scale of tensor {name!r} is NaN (E8M0 byte 255); download it again")


def _check(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, int] | None = None
) -> None:
    fits = tensor.dim() == 2 if shape is None else tuple(tensor.shape) == shape
    if tensor.dtype != dtype or not fits:
        wanted = "a matrix" if shape is None else list(shape)
        raise LoadError(
            f"tensor {name!r} is {_told(tensor)}; {str(dtype).removeprefix('torch.')} {wanted} is "
            "needed"
        )


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
