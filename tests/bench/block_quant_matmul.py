"""Multiplying by block-quantised weights as stored, against dequantising them: at load or per call.

    python tests/bench/block_quant_matmul.py [--repeats 7] [--rows 1 8 64 512]

Matrices of DeepSeek-V4-Flash's shapes, random, in bf16, on CUDA if there is one: the kernel, a
matrix dequantised to bf16 beforehand (what dequantising at load costs, in two to four times the
memory), and dequantising in every call, with torch's operators. So many copies of a matrix take
turns that none is still in the GPU's cache.

Without CUDA there is no kernel to measure: small matrices then show what keeping weights quantised
would cost on CPU, which is why they are dequantised at load there.

Prints one JSON object per matrix and number of rows: medians in milliseconds per multiplication,
and ratios to the kernel (on CPU: to the matrix dequantised at load), medians of the same rounds.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.quant_matmul import plan_of, quant_matmul
from common.loading.block_quant import E8M0, FP8, QuantWeight
from common.nn.linear import Linear
from common.testing.timing import interleaved, machine, median_ratio

Case = Callable[[Tensor], object]
CACHE_BYTES = 256 << 20  # well above any GPU's second-level cache


@dataclass(frozen=True)
class Shape:
    """[outputs, inputs] of a matrix, or of each of a layer's experts."""

    name: str
    packed: bool
    num_outputs: int
    num_inputs: int
    num_experts: int = 1
    num_chosen: int = 1


FLASH = [
    Shape("wq_a", False, 1024, 4096),
    Shape("wq_b", False, 32768, 1024),
    Shape("wo_b", False, 4096, 8192),
    Shape("shared expert, gate and up", False, 4096, 4096),
    Shape("6 of 256 experts, gate and up", True, 4096, 4096, 256, 6),
    Shape("6 of 256 experts, down", True, 4096, 2048, 256, 6),
]
SMALL = [Shape("wq_a", False, 1024, 4096), Shape("one expert, down", True, 4096, 2048)]


def random_weight(shape: Shape, device: str) -> QuantWeight:
    """Any codes, none of them NaN; scales around 2^-7."""
    size = (shape.num_experts, shape.num_outputs, shape.num_inputs // (2 if shape.packed else 1))
    codes = torch.randint(0, 127, size, dtype=torch.uint8, device=device)
    group = 32 if shape.packed else 128
    scales = torch.randint(
        118, 122, (*size[:2], shape.num_inputs // group), dtype=torch.uint8, device=device
    )
    return QuantWeight(codes if shape.packed else codes.view(FP8), scales.view(E8M0), group)


def in_turn(copies: list[Case], x: Tensor, on_cuda: bool) -> Callable[[], None]:
    """All copies once; on CUDA until the last result is there."""

    def run() -> None:
        for copy in copies:
            copy(x)
        if on_cuda:
            torch.cuda.synchronize()

    return run


def dense_cases(shape: Shape, on_cuda: bool) -> tuple[int, dict[str, list[Case]]]:
    """Bytes of a stored matrix; name -> one case per copy."""
    device = "cuda" if on_cuda else "cpu"
    probe = random_weight(shape, device)
    count = -(-CACHE_BYTES // probe.num_bytes) if on_cuda else 1
    weights = [probe, *(random_weight(shape, device) for _ in range(count - 1))]
    at_load = [Linear(weight.dequantised().bfloat16()) for weight in weights]
    per_call: list[Case] = [
        lambda x, weight=weight: x @ weight.dequantised().bfloat16().t()  # type: ignore[misc]
        for weight in weights
    ]
    cases: dict[str, list[Case]] = {"at_load": list(at_load), "per_call": per_call}
    if on_cuda:
        cases["kernel"] = [
            lambda x, weight=weight: quant_matmul(x, weight)  # type: ignore[misc]
            for weight in weights
        ]
    return probe.num_bytes, cases


def expert_cases(shape: Shape, chosen: Tensor) -> tuple[int, dict[str, list[Case]]]:
    """chosen [rows, n]. One launch over all pairs against one multiplication per expert in use.

    One layer of experts is larger than the cache; whatever it takes to find the rows of each expert
    is part of the figure.
    """
    weight = random_weight(shape, "cuda")
    plain = torch.stack([weight.dequantised(i).bfloat16() for i in range(shape.num_experts)])

    def kernel(x: Tensor) -> Tensor:
        return quant_matmul(x, weight, plan_of(chosen.flatten(), shape.num_experts))

    def at_load(x: Tensor) -> None:
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).any(1).nonzero().squeeze(1)
            torch.nn.functional.linear(x[rows], plain[expert])

    def per_call(x: Tensor) -> None:
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).any(1).nonzero().squeeze(1)
            torch.nn.functional.linear(x[rows], weight.dequantised(expert).bfloat16())

    return weight.num_bytes, {"at_load": [at_load], "per_call": [per_call], "kernel": [kernel]}


def measure(shape: Shape, num_rows: int, repeats: int, on_cuda: bool) -> dict[str, object]:
    """One line of the report."""
    device = "cuda" if on_cuda else "cpu"
    x = torch.randn(num_rows, shape.num_inputs, device=device).bfloat16()
    if shape.num_experts > 1:
        scores = torch.rand(num_rows, shape.num_experts, device=device)
        num_bytes, cases = expert_cases(shape, scores.topk(shape.num_chosen).indices)
    else:
        num_bytes, cases = dense_cases(shape, on_cuda)
    runs = {name: in_turn(copies, x, on_cuda) for name, copies in cases.items()}
    seconds = interleaved(runs, repeats)
    per_copy = {name: 1e3 / len(copies) for name, copies in cases.items()}
    ours = "kernel" if on_cuda else "at_load"
    others = [name for name in cases if name != ours]
    return {
        "matrix": shape.name,
        "format": "mxfp4" if shape.packed else "fp8",
        "shape": [shape.num_outputs, shape.num_inputs],
        "rows": num_rows,
        "stored_mib": round(num_bytes / 2**20, 1),
        "ms": {n: round(per_copy[n] * statistics.median(s), 4) for n, s in seconds.items()},
        f"ratio_to_{ours}": {n: round(median_ratio(seconds[n], seconds[ours]), 2) for n in others},
    }


def main() -> None:
    """Prints one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    args = parser.parse_args()
    torch.manual_seed(0)
    on_cuda = torch.cuda.is_available()
    if not on_cuda:
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if on_cuda else machine()
    note = "" if on_cuda else "no CUDA device: the kernel was not measured"
    print(json.dumps({"machine": where, "torch": torch.__version__, "note": note}), flush=True)
    with torch.inference_mode():
        for shape in FLASH if on_cuda else SMALL:
            for num_rows in args.rows:
                line = measure(shape, num_rows, args.repeats, on_cuda)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
