"""Block-quantised multiplication: plans, the reference, and what can be known of the kernel without
a GPU: what Triton's interpreter computes, and that every variant compiles for Hopper.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from common.kernels import quant_matmul_triton
from common.kernels.quant_matmul import plan_of, quant_matmul
from common.loading.block_quant import E8M0, FP8, QuantWeight

INTERPRETED = Path(__file__).parent / "interpreted" / "quant_matmul.py"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
def test_the_kernel_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "--noconftest", "-x", str(INTERPRETED)]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


class NoGpu:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """The GPU that there would be."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Its number, by which Triton remembers what it compiled."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """Its default stream."""
        return 0


@pytest.fixture(params=[89, 90, 100], ids="sm_{}".format)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches end after compiling for that GPU; the list gets what they would have started."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        kernels.append(run(self, *args, **options | {"warmup": True}))
        assert kernels[-1].metadata.target.arch == request.param

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", NoGpu(request.param))
    return kernels


def weight_of(kind: str, experts: int = 1) -> QuantWeight:
    """Zeros, [experts, 256, 512]."""
    packed = kind != "fp8"
    codes = torch.zeros(experts, 256, 256 if packed else 512, dtype=torch.uint8)
    group = {"fp8": 128, "mxfp4": 32, "nvfp4": 16}[kind]
    scales = torch.zeros(experts, 256, 512 // group, dtype=torch.uint8)
    return QuantWeight(
        codes if packed else codes.view(FP8),
        scales.view(FP8 if kind == "nvfp4" else E8M0),
        group,
        torch.ones(experts, 256) if kind == "nvfp4" else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_all_variants_compile(kind: str, compiled: list[Any]) -> None:
    """As launched for real shapes; the decoding of e2m1 counts on subnormal float32 numbers."""
    for num_rows, dtype, planned in (
        (1, torch.bfloat16, False),
        (1, torch.bfloat16, True),
        (64, torch.bfloat16, True),
        (300, torch.bfloat16, True),
        (300, torch.float32, False),
    ):
        ids = torch.arange(2 * num_rows) % 2
        quant_matmul_triton.launch(
            torch.zeros(num_rows, 512, dtype=dtype),
            weight_of(kind, 2 if planned else 1),
            plan_of(ids, 2) if planned else None,
        )
    assert len(compiled) == 5
    for kernel in compiled:
        assert kernel.asm["cubin"] and ".ftz" not in kernel.asm["ptx"]
        assert kernel.metadata.shared <= 99 * 1024, "more than the smallest of these GPUs has"
    if compiled[0].metadata.target.arch == 90:
        assert "wgmma.mma_async" in compiled[0].asm["ptx"]


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(-2, 9), max_size=300),
    num_matrices=st.integers(1, 8),
)
def test_a_plan_covers_every_row_once(ids: list[int], num_matrices: int) -> None:
    plan = plan_of(torch.tensor(ids, dtype=torch.int64), num_matrices)
    if plan.tiles is None or plan.order is None:
        assert plan.tiles is plan.order is None and len(ids) <= num_matrices
        return
    covered: list[int] = []
    for matrix, first, end in plan.tiles.tolist():
        assert 0 <= first <= end <= len(ids) and end - first <= plan.rows_per_tile
        rows = plan.order[first:end].tolist()
        assert all(ids[row] == matrix for row in rows)
        covered += rows
    assert sorted(covered) == [row for row, i in enumerate(ids) if 0 <= i < num_matrices]


def test_what_does_not_fit_is_refused() -> None:
    weight = weight_of("fp8", 2)
    x = torch.zeros(3, 512)
    with pytest.raises(AssertionError, match="2 matrices need a plan"):
        quant_matmul(x, weight)
    plan = plan_of(torch.zeros(3, dtype=torch.int64), 2)
    for bad in (x[:, :511], x.half(), x.t().contiguous().t(), x[0]):
        with pytest.raises(AssertionError, match="with codes"):
            quant_matmul(bad, weight, plan)
    with pytest.raises(AssertionError, match="needs"):
        QuantWeight(weight.codes, weight.scales[:, :, :3].contiguous(), 128)
    with pytest.raises(AssertionError, match="group 96"):
        QuantWeight(weight.codes, weight.scales, 96)
    assert quant_matmul(x, weight, plan).shape == (3, 256)
