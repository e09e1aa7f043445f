"""Block-quantised formats against their definition, element by element, and their refusals."""

import pytest
import torch

from common.errors import LoadError
from common.loading.block_quant import (
    dequantise_fp8,
    dequantise_mxfp4,
    dequantise_nvfp4,
    unpack_fp4,
)
from common.testing.block_quant import quantise_fp8, quantise_mxfp4

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e8m0(exponent_bytes: torch.Tensor) -> torch.Tensor:
    return exponent_bytes.to(torch.uint8).view(torch.float8_e8m0fnu)


def test_fp8_by_definition_with_ragged_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(5, 7, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 150, (3, 2), generator=generator)
    got = dequantise_fp8("w", codes, e8m0(exponents), (2, 4))
    for o in range(5):
        for i in range(7):
            scale = 2.0 ** (int(exponents[o // 2, i // 4]) - 127)
            assert got[o, i].item() == float(codes[o, i]) * scale


def test_every_fp4_code_low_nibble_first() -> None:
    low, high = torch.arange(16), torch.arange(16).flip(0)
    packed = (low | high << 4).to(torch.uint8)[None]
    for stored in (packed, packed.view(torch.int8)):
        assert unpack_fp4("w", stored)[0].tolist() == [
            value for a, b in zip(FP4, reversed(FP4), strict=True) for value in (a, b)
        ]


def test_mxfp4_and_nvfp4_scale_their_own_group() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (3, 32), generator=generator, dtype=torch.uint8)
    plain = unpack_fp4("w", codes)
    exponents = torch.randint(110, 130, (3, 2), generator=generator)
    got = dequantise_mxfp4("w", codes.view(torch.int8), e8m0(exponents))
    small = torch.rand(3, 4, generator=generator).to(torch.float8_e4m3fn)
    got_nv = dequantise_nvfp4("w", codes, small, torch.tensor(0.5))
    for o in range(3):
        for i in range(64):
            assert got[o, i] == plain[o, i] * 2.0 ** (int(exponents[o, i // 32]) - 127)
            assert got_nv[o, i] == plain[o, i] * float(small[o, i // 16]) * 0.5


def test_the_testing_quantisers_invert() -> None:
    """What lies on the grid comes back exactly, anything else closely."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(100, 96, generator=generator) * 0.05
    back = dequantise_fp8("w", *quantise_fp8(weight, (64, 32)), (64, 32))
    assert (back - weight).abs().max() < 0.05 * weight.abs().max()
    assert torch.equal(dequantise_fp8("w", *quantise_fp8(back, (64, 32)), (64, 32)), back)
    back = dequantise_mxfp4("w", *quantise_mxfp4(weight))
    assert (back - weight).abs().max() <= weight.abs().max() / 4
    assert torch.equal(dequantise_mxfp4("w", *quantise_mxfp4(back)), back)


CODES = torch.zeros(4, 32).to(torch.float8_e4m3fn)
PACKED = torch.zeros(4, 16, dtype=torch.int8)
ONE = e8m0(torch.full((1, 1), 127))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dequantise_fp8("w", CODES.float(), ONE, (128, 128)), "float8_e4m3fn"),
        (lambda: dequantise_fp8("w", CODES, ONE, (2, 128)), r"\[2, 1\] is needed"),
        (lambda: dequantise_fp8("w", CODES, torch.ones(1, 1), (128, 128)), "float8_e8m0fnu"),
        (lambda: dequantise_fp8("w", CODES, e8m0(torch.tensor([[255]])), (128, 128)), "NaN"),
        (lambda: dequantise_mxfp4("w", PACKED, ONE), r"\[4, 1\] is needed"),
        (lambda: unpack_fp4("w", PACKED.float()), "bytes"),
        (
            lambda: dequantise_nvfp4(
                "w", PACKED, torch.ones(4, 2).to(torch.float8_e4m3fn), torch.ones(2)
            ),
            "one float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        call()
