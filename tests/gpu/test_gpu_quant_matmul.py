"""On CUDA: the block-quantised kernel against its reference, and V4 with weights kept as stored.

What Triton's interpreter cannot show: bf16 on tensor cores, NaN codes, subnormal numbers there.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.kernels.quant_matmul import plan_of, quant_matmul, reference
from common.loading.block_quant import E2M1, E8M0, FP8, QuantWeight
from common.models.deepseek_v4.drafter import load_deepseek_v4_drafter
from common.models.deepseek_v4.experts import StackedExperts
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.deepseek_v4.model import DeepseekV4Target
from common.models.interfaces import Numerics
from common.nn.attention import AttentionBatch, Segment
from common.nn.quant_linear import QuantLinear
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.numeric import max_difference
from common.testing.repacks import repack_fp8, repack_nvfp4, rewritten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
DEVICE = "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest result
IDS = torch.arange(40) * 7 % 90


def random_weight(kind: str, shape: tuple[int, int, int]) -> QuantWeight:
    """Any codes but NaN, scales around 1."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def bytes_below(stop: int, *size: int, start: int = 0) -> Tensor:
        return torch.randint(
            start, stop, size, dtype=torch.uint8, device=DEVICE, generator=generator
        )

    rows = shape[:2]
    if kind == "fp8":
        codes = torch.randn(shape, device=DEVICE, generator=generator).to(FP8)
        return QuantWeight(
            codes, bytes_below(130, *rows, -(-shape[2] // 128), start=122).view(E8M0), 128
        )
    codes = bytes_below(256, *rows, shape[2] // 2)
    if kind == "mxfp4":
        return QuantWeight(codes, bytes_below(130, *rows, shape[2] // 32, start=122).view(E8M0), 32)
    scales = torch.rand(*rows, shape[2] // 16, device=DEVICE, generator=generator).to(FP8)
    factors = torch.rand(rows, device=DEVICE, generator=generator) + 0.5
    return QuantWeight(codes, scales, 16, factors)


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """x."""
    generator = torch.Generator(DEVICE).manual_seed(count)
    return torch.randn(count, width, device=DEVICE, generator=generator).to(dtype)


def close(found: Tensor, expected: Tensor) -> bool:
    """Relative to the largest value."""
    return max_difference(found, expected) <= TOLERANCE[found.dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(1, 33, 96), (1, 512, 4096), (1, 4000, 1056)])
def test_kernel_equals_reference(
    shape: tuple[int, int, int], kind: str, dtype: torch.dtype
) -> None:
    weight = random_weight(kind, shape)
    for num_rows in (1, 6, 17, 64, 65, 300):
        x = rows(num_rows, shape[2], dtype)
        assert close(quant_matmul(x, weight), reference(x, weight)), num_rows
    assert quant_matmul(rows(0, shape[2], dtype), weight).shape == (0, shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_experts_equal_reference(kind: str, dtype: torch.dtype) -> None:
    """Two experts per row of x, some of them another rank's."""
    weight = random_weight(kind, (8, 200, 512))
    for num_rows in (1, 5, 64, 500):
        generator = torch.Generator().manual_seed(num_rows)
        ids = torch.randint(-2, 11, (2 * num_rows,), generator=generator).to(DEVICE)
        plan, x = plan_of(ids, 8), rows(num_rows, 512, dtype)
        assert close(quant_matmul(x, weight, plan), reference(x, weight, plan)), num_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_scale_and_code_is_exact(dtype: torch.dtype) -> None:
    """All that both float32 and the dtype's normal numbers hold; NaN scales and NaN codes."""
    exponents = torch.arange(256, device=DEVICE).repeat_interleave(16)
    code = torch.arange(16, device=DEVICE).repeat(256)
    codes = torch.zeros(4096, 16, dtype=torch.uint8, device=DEVICE)
    codes[:, 3] = code.to(torch.uint8) << 4
    scales = exponents.to(torch.uint8).view(E8M0)
    x = torch.zeros(1, 32, dtype=dtype, device=DEVICE)
    x[0, 7] = 1
    found = quant_matmul(x, QuantWeight(codes[None], scales[None, :, None].contiguous(), 32))[0]
    expected = E2M1.to(DEVICE)[code] * scales.float()
    normal = (expected.abs() >= 2.0**-126) & expected.isfinite() | (expected == 0)
    assert torch.equal(found[normal].float(), expected[normal])
    assert found[exponents == 255].isnan().all()
    all_codes = torch.zeros(256, 32, dtype=torch.uint8, device=DEVICE)
    all_codes[:, 5] = torch.arange(256, device=DEVICE)
    ones = torch.full((1, 256, 1), 127, dtype=torch.uint8, device=DEVICE).view(E8M0)
    x = torch.zeros(1, 32, dtype=dtype, device=DEVICE)
    x[0, 5] = 1
    found = quant_matmul(x, QuantWeight(all_codes.view(FP8)[None], ones, 32))[0]
    expected = all_codes.view(FP8)[:, 5].to(dtype)
    assert torch.equal(found.nan_to_num(nan=7e5), expected.nan_to_num(nan=7e5))
    assert found.isnan().nonzero().flatten().tolist() == [127, 255]


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit for bit, among as many rows, wherever in a tile it falls."""
    weight, x = random_weight("mxfp4", (8, 128, 512)), rows(64, 512, torch.bfloat16)
    ids = torch.arange(64, device=DEVICE) % 8
    alone = quant_matmul(x, weight, plan_of(ids, 8))
    crowded_ids = torch.where(torch.arange(64, device=DEVICE) < 40, 3, ids)
    crowded = quant_matmul(x, weight, plan_of(crowded_ids, 8))
    same = ids == crowded_ids
    assert 20 < same.sum() < 64 and torch.equal(alone[same], crowded[same])
    dense = random_weight("fp8", (1, 512, 4096))
    x = rows(16, 4096, torch.bfloat16)
    turned = quant_matmul(x.roll(5, 0), dense)
    assert torch.equal(turned.roll(-5, 0), quant_matmul(x, dense))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), compress_rate_hca=16)


def logits_and_taps(model: DeepseekV4Target, ids: Tensor = IDS) -> tuple[Tensor, Tensor]:
    """After one prefill, on CPU in float32."""
    kv, table, n = model.new_kv(8, 16), [3, 6, 1], len(ids)
    slots = torch.tensor(kv.slots_of(table, 0, n), device=model.device)
    positions = torch.arange(n, device=model.device)
    batch = AttentionBatch([Segment(0, n, n, table)], slots, positions)
    hidden, taps = model.forward(ids.to(model.device), kv, batch, (2, 3, 4))
    assert taps is not None
    return model.logits(hidden).cpu(), taps.float().cpu()


@pytest.mark.parametrize("repack", [None, repack_fp8, repack_nvfp4])
@pytest.mark.parametrize("numerics", ["fast", "batch_invariant"])
def test_a_kept_target_equals_the_cpu(
    folder: Path, tmp_path: Path, numerics: Numerics, repack: object
) -> None:
    if repack is repack_fp8:
        folder = rewritten(folder, tmp_path, repack_fp8, expert_dtype="fp8")
    elif repack is repack_nvfp4:
        folder = rewritten(folder, tmp_path, repack_nvfp4)
    expected = logits_and_taps(load_deepseek_v4(folder, torch.float32, "cpu")[0])
    model, report = load_deepseek_v4(folder, torch.float32, DEVICE, numerics)
    assert isinstance(model.layers[0].experts.experts, StackedExperts)
    assert sum("kept as" in note for note in report.notes) >= 1
    for found, wanted in zip(logits_and_taps(model), expected, strict=True):
        assert max_difference(found, wanted) < 1e-3
    rough, _ = load_deepseek_v4(folder, torch.bfloat16, DEVICE, numerics)
    agree = logits_and_taps(rough)[0].argmax(1) == expected[0].argmax(1)
    assert agree.float().mean() > 0.9


def test_a_kept_drafter_equals_the_cpu(folder: Path) -> None:
    results = []
    for device in ("cpu", DEVICE):
        model, _ = load_deepseek_v4_drafter(folder, torch.float32, device)
        assert isinstance(model.project.proj, QuantLinear) == (device != "cpu")
        kv, table = model.new_kv(4, 16), [[2, 0, 1]]
        taps = torch.randn(
            20, model.config.feature_width, generator=torch.Generator().manual_seed(0)
        )
        slots = torch.tensor(kv.slots_of(table[0], 0, 20), device=device)
        model.ingest(model.project(taps.to(device)), kv, slots, torch.arange(20, device=device))
        anchors, starts = (torch.tensor([i], device=device) for i in (5, 20))
        hidden, logits = model.block(anchors, starts, 5, kv, table)
        results.append(torch.cat([hidden, logits], dim=2).cpu())
    assert max_difference(*results) < 1e-3


def test_batch_invariant_rows_do_not_depend_on_each_other(folder: Path) -> None:
    """bf16, experts stacked: a prefix's logits are the same bits whatever follows it."""
    model, _ = load_deepseek_v4(folder, torch.bfloat16, DEVICE, "batch_invariant")
    whole, part = logits_and_taps(model)[0], logits_and_taps(model, IDS[:23])[0]
    assert torch.equal(whole[:23], part)
