"""Block-quantised formats against their definition, element by element, and their refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import LoadError
from common.loading.block_quant import QuantWeight, fp8_weight, joined, mxfp4_weight, nvfp4_weight
from common.testing.block_quant import quantise_fp8, quantise_mxfp4

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e8m0(exponent_bytes: torch.Tensor) -> torch.Tensor:
    return exponent_bytes.to(torch.uint8).view(torch.float8_e8m0fnu)


def test_fp8_by_definition_with_ragged_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(5, 7, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 150, (3, 2), generator=generator)
    got = fp8_weight("w", codes, e8m0(exponents), (2, 4)).dequantised()
    for o in range(5):
        for i in range(7):
            scale = 2.0 ** (int(exponents[o // 2, i // 4]) - 127)
            assert got[o, i].item() == float(codes[o, i]) * scale


def test_every_fp4_code_low_nibble_first() -> None:
    low, high = torch.arange(16), torch.arange(16).flip(0)
    packed = (low | high << 4).to(torch.uint8)[None]
    for stored in (packed, packed.view(torch.int8)):
        got = mxfp4_weight("w", stored, e8m0(torch.full((1, 1), 127))).dequantised()
        assert got[0].tolist() == [
            value for a, b in zip(FP4, reversed(FP4), strict=True) for value in (a, b)
        ]


def test_mxfp4_and_nvfp4_scale_their_own_group() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (3, 32), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(110, 130, (3, 2), generator=generator)
    got = mxfp4_weight("w", codes.view(torch.int8), e8m0(exponents)).dequantised()
    small = torch.rand(3, 4, generator=generator).to(torch.float8_e4m3fn)
    got_nv = nvfp4_weight("w", codes, small, torch.tensor(0.5)).dequantised()
    for o in range(3):
        for i in range(64):
            plain = FP4[int(codes[o, i // 2]) >> 4 * (i % 2) & 15]
            assert got[o, i] == plain * 2.0 ** (int(exponents[o, i // 32]) - 127)
            assert got_nv[o, i] == plain * float(small[o, i // 16]) * 0.5


@settings(max_examples=100, deadline=None)
@given(data=st.data(), block=st.sampled_from([(2, 4), (3, 6), (16, 32), (5, 7)]))
def test_a_slice_of_a_matrix_keeps_its_scales(data: st.DataObject, block: tuple[int, int]) -> None:
    """Wherever it starts and ends within blocks."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(40, 70, generator=generator).to(torch.float8_e4m3fn)
    whole = tuple(-(-size // width) for size, width in zip(codes.shape, block, strict=True))
    scales = e8m0(torch.randint(100, 150, whole, generator=generator))
    own, touched = [], []
    for size, width in zip(codes.shape, block, strict=True):
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        own.append(slice(start, stop))
        touched.append(slice(start // width, -(-stop // width)))
    first = (own[0].start % block[0], own[1].start % block[1])
    part = codes[own[0], own[1]]
    got = fp8_weight("w", part, scales[touched[0], touched[1]], block, first)
    expected = fp8_weight("w", codes, scales, block).dequantised()[own[0], own[1]]
    assert torch.equal(got.dequantised(), expected)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_joined_weights_are_what_they_were(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)

    def weight(rows: int) -> QuantWeight:
        if kind == "fp8":
            return fp8_weight("w", *quantise_fp8(torch.randn(rows, 64), (4, 32)), (4, 32))
        codes, scales = quantise_mxfp4(torch.randn(rows, 64, generator=generator))
        if kind == "mxfp4":
            return mxfp4_weight("w", codes, scales)
        small = torch.rand(rows, 4, generator=generator).to(torch.float8_e4m3fn)
        return nvfp4_weight("w", codes, small, torch.rand(1, generator=generator))

    parts = [weight(6), weight(3)]
    rows = joined(parts, 1)
    assert torch.equal(rows.dequantised(), torch.cat([part.dequantised() for part in parts]))
    assert rows.num_bytes == sum(part.num_bytes for part in parts)
    experts = joined([rows, weight(9)], 0)
    assert torch.equal(experts.dequantised(0), rows.dequantised())
    other = fp8_weight("w", *quantise_fp8(torch.randn(6, 64), (4, 16)), (4, 16))
    with pytest.raises(AssertionError, match="cannot be joined"):
        joined([rows, other], 1)


def test_the_testing_quantisers_invert() -> None:
    """What lies on the grid comes back exactly, anything else closely."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(100, 96, generator=generator) * 0.05

    def fp8(plain: torch.Tensor) -> torch.Tensor:
        return fp8_weight("w", *quantise_fp8(plain, (64, 32)), (64, 32)).dequantised()

    def mxfp4(plain: torch.Tensor) -> torch.Tensor:
        return mxfp4_weight("w", *quantise_mxfp4(plain)).dequantised()

    assert (fp8(weight) - weight).abs().max() < 0.05 * weight.abs().max()
    assert torch.equal(fp8(fp8(weight)), fp8(weight))
    assert (mxfp4(weight) - weight).abs().max() <= weight.abs().max() / 4
    assert torch.equal(mxfp4(mxfp4(weight)), mxfp4(weight))


CODES = torch.zeros(4, 32).to(torch.float8_e4m3fn)
PACKED = torch.zeros(4, 16, dtype=torch.int8)
ONE = e8m0(torch.full((1, 1), 127))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fp8_weight("w", CODES.float(), ONE, (128, 128)), "float8_e4m3fn"),
        (lambda: fp8_weight("w", CODES, ONE, (2, 128)), r"\[2, 1\] is needed"),
        (lambda: fp8_weight("w", CODES, torch.ones(1, 1), (128, 128)), "float8_e8m0fnu"),
        (lambda: fp8_weight("w", CODES, e8m0(torch.tensor([[255]])), (128, 128)), "NaN"),
        (lambda: mxfp4_weight("w", PACKED, ONE), r"\[4, 1\] is needed"),
        (lambda: mxfp4_weight("w", PACKED.float(), ONE), "bytes"),
        (lambda: mxfp4_weight("w", PACKED[:, :9], ONE), "18 inputs; fp4 comes in groups of 32"),
        (
            lambda: nvfp4_weight(
                "w", PACKED, torch.ones(4, 2).to(torch.float8_e4m3fn), torch.ones(2)
            ),
            "one float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        call()
