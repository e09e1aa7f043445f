"""The Triton kernel against its reference, in float32, by Triton's interpreter.

Triton decides for its interpreter when it is imported, so `test_quant_matmul.py` runs this file in
a process of its own. The interpreter multiplies bf16 wrongly: x is float32, the tiles are those
of both dtypes.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.kernels.quant_matmul import Plan, plan_of, reference
from common.kernels.quant_matmul_triton import Tiles, launch
from common.loading.block_quant import E2M1, E8M0, FP8, QuantWeight
from common.testing.numeric import max_difference

torch.set_num_threads(1)
FP32_TILES = Tiles(16, 32, 32)
BF16_TILES = Tiles(16, 64, 128)


def e8m0(exponents: Tensor) -> Tensor:
    """Exponents as stored: bytes."""
    return exponents.to(torch.uint8).view(E8M0)


def fp8_weight(shape: tuple[int, int, int], group: int, seed: int = 0) -> QuantWeight:
    """Random codes, scales around 1."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=generator).to(FP8)
    groups = (*shape[:2], -(-shape[2] // group))
    return QuantWeight(codes, e8m0(torch.randint(122, 130, groups, generator=generator)), group)


def fp4_weight(shape: tuple[int, int, int], group: int, seed: int = 0) -> QuantWeight:
    """MXFP4 if group is 32, NVFP4 if it is 16: all codes, scales around 1."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), generator=generator)
    groups = (*shape[:2], shape[2] // group)
    if group == 32:
        scales = e8m0(torch.randint(122, 130, groups, generator=generator))
        return QuantWeight(codes.to(torch.uint8), scales, group)
    scales = torch.rand(groups, generator=generator).to(FP8)
    factors = torch.rand(shape[:2], generator=generator) + 0.5
    return QuantWeight(codes.to(torch.uint8), scales, group, factors)


def rows(count: int, width: int, seed: int = 1) -> Tensor:
    """x."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def check(x: Tensor, weight: QuantWeight, tiles: Tiles | None, plan: Plan | None = None) -> None:
    """Up to the order of float32 additions."""
    found, expected = launch(x, weight, plan, tiles), reference(x, weight, plan)
    largest = float(expected.abs().max()) if len(expected) else 0.0
    assert max_difference(found, expected) <= 1e-7 * x.shape[1] ** 0.5 * (largest + 1)


@pytest.mark.parametrize("tiles", [None, BF16_TILES, BF16_TILES._replace(num_splits=4)])
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(3, 70, 224), (17, 65, 544)])
@pytest.mark.parametrize("kind", ["fp8-128", "fp8-8", "mxfp4", "nvfp4"])
def test_shapes_that_fill_no_tile(
    kind: str, num_rows: int, num_outputs: int, num_inputs: int, tiles: Tiles | None
) -> None:
    shape = (1, num_outputs, num_inputs)
    if kind.startswith("fp8"):
        weight = fp8_weight(shape, int(kind.removeprefix("fp8-")))
    else:
        weight = fp4_weight(shape, 32 if kind == "mxfp4" else 16)
    check(rows(num_rows, num_inputs), weight, tiles)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    num_outputs=st.integers(1, 150),
    num_inputs=st.integers(1, 300),
    group=st.sampled_from([4, 16, 32, 64, 128, 256]),
    tiles=st.sampled_from([None, FP32_TILES, BF16_TILES, Tiles(64, 64, 128, 2)]),
)
def test_fp8_of_any_shape(
    num_rows: int, num_outputs: int, num_inputs: int, group: int, tiles: Tiles | None
) -> None:
    check(rows(num_rows, num_inputs), fp8_weight((1, num_outputs, num_inputs), group), tiles)


@pytest.mark.parametrize("tiles", [FP32_TILES, BF16_TILES])
def test_every_e4m3_code(tiles: Tiles) -> None:
    """Row c of W holds code c alone. The interpreter takes the NaN codes 127 and 255 for 480."""
    codes = torch.zeros(256, 32, dtype=torch.uint8)
    codes[:, 5] = torch.arange(256)
    weight = QuantWeight(codes.view(FP8)[None], e8m0(torch.full((1, 256, 1), 127)), 32)
    x = torch.zeros(2, 32)
    x[:, 5] = torch.tensor([1.0, -2.0])
    expected = torch.outer(x[:, 5], codes.view(FP8)[:, 5].float())
    real = torch.arange(256) % 128 < 127
    assert torch.equal(launch(x, weight, tiles=tiles)[:, real], expected[:, real])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("tiles", [FP32_TILES, BF16_TILES])
@pytest.mark.parametrize("packed", [True, False])
def test_every_scale_and_every_e2m1_code(packed: bool, tiles: Tiles) -> None:
    """Exact from 2^-127, below float32's normal numbers, to 2^127; byte 255 is NaN."""
    exponents = torch.arange(256).repeat_interleave(16)
    if packed:
        code = torch.arange(16).repeat(256)
        codes = torch.zeros(4096, 16, dtype=torch.uint8)
        codes[:, 3], position = code << 4, 7  # a high nibble is the second of its pair
        values = E2M1[code]
    else:
        values, position = torch.tensor([1, -1.75, 2**-9, -448] * 1024), 3
        codes = torch.zeros(4096, 32)
        codes[:, 3] = values
        codes = codes.to(FP8)
    weight = QuantWeight(codes[None], e8m0(exponents[None, :, None]), 32)
    x = torch.zeros(1, 32)
    x[0, position] = 1
    found = launch(x, weight, tiles=tiles)[0]
    scales = e8m0(exponents).float()
    expected = values * scales
    real = exponents < 255
    # A scale behind the sum meets 0 before it is infinite, one before it meets it after: not looked
    # at where a product leaves float32.
    fits = expected.isfinite() & real
    assert fits.sum() > 4000 and torch.equal(found[fits], expected[fits])
    assert found[~real].isnan().all()


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(1, 3), (2, 2), (9, 2), (70, 1), (0, 2)])
def test_experts(kind: str, num_tokens: int, num_chosen: int) -> None:
    """Unused experts, crowded ones (two tiles), rows of other ranks' experts: zeros."""
    shape = (5, 70, 160)
    weight = (
        fp8_weight(shape, 128) if kind == "fp8" else fp4_weight(shape, 16 if kind[0] == "n" else 32)
    )
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1, 7, (num_tokens * num_chosen,), generator=generator)
    ids[ids == 3] = 2
    plan, x = plan_of(ids, 5), rows(num_tokens, 160)
    for tiles in (None, BF16_TILES._replace(x_rows=plan.rows_per_tile)):
        check(x, weight, tiles, plan)
    assert (launch(x, weight, plan)[(ids < 0) | (ids > 4)] == 0).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit for bit, as long as as many rows run."""
    weight, x = fp4_weight((4, 40, 64), 32), rows(12, 64)
    ids = torch.arange(12) % 4
    alone = launch(x, weight, plan_of(ids, 4))
    crowded = launch(x, weight, plan_of(torch.ones_like(ids), 4))
    assert torch.equal(alone[5], crowded[5]) and ids[5] == 1
