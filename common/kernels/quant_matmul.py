"""y = x @ W.T with W as the checkpoint stores it: fp8 or packed fp4 codes under block scales.

Several matrices of one shape, the experts, may lie in one weight; a plan says which row of x meets
which of them.

Only the weight is quantised. The released inference code also rounds x to fp8, per row and 128
inputs, to use fp8 tensor cores; that is a speed-up that other engines leave out or do differently,
and x as it is gives what multiplying by the dequantised weight gives: that is what the numerics are
compared with. Here: checks, the reference in torch, the choice of the path. Knows no model.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.loading.block_quant import QuantWeight

ROWS_PER_TILE = (16, 32, 64, 128)


@dataclass(frozen=True)
class Plan:
    """Which matrix each row of the result comes from, and how the kernel takes them together."""

    matrix_ids: Tensor  # [R] int64; what is no number of a matrix stands for none: a row of zeros
    rows_per_tile: int
    # None: every row is a tile of its own.
    order: Tensor | None = None  # [R] int32: rows, those of one matrix side by side
    tiles: Tensor | None = None  # [num_tiles, 3] int32: matrix, first and end in `order`


def plan_of(matrix_ids: Tensor, num_matrices: int) -> Plan:
    """matrix_ids [R] int64. Waits for nothing on the device: shapes follow from R alone.

    Few rows hardly ever share a matrix, so they are not sorted: that would take some thirty small
    operations, and a matrix that is read twice is in the GPU's cache.
    """
    num_rows = len(matrix_ids)
    size = rows_per_tile(-(-num_rows // num_matrices))
    if num_rows <= num_matrices:
        return Plan(matrix_ids, size)
    foreign = (matrix_ids < 0) | (matrix_ids >= num_matrices)
    ids = matrix_ids.masked_fill(foreign, num_matrices)
    counts = torch.zeros(num_matrices + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, ids, torch.ones_like(ids))[:-1]
    num_tiles = (counts + size - 1) // size
    tile_ends, row_ends = num_tiles.cumsum(0), counts.cumsum(0)
    # Every matrix has at most one tile that is not full; surplus tiles are empty, at the end.
    tile = torch.arange(num_rows // size + num_matrices, device=ids.device)
    matrix = torch.searchsorted(tile_ends, tile, right=True).clamp(max=num_matrices - 1)
    first = (row_ends - counts)[matrix] + (tile - (tile_ends - num_tiles)[matrix]) * size
    end = torch.minimum(first + size, row_ends[matrix])
    tiles = torch.stack([matrix, torch.minimum(first, end), end], dim=1).to(torch.int32)
    return Plan(ids, size, ids.argsort(stable=True).to(torch.int32), tiles)


def rows_per_tile(num_rows: int) -> int:
    """The smallest tile that holds so many rows, or the largest there is."""
    return next((size for size in ROWS_PER_TILE if size >= num_rows), ROWS_PER_TILE[-1])


def quant_matmul(x: Tensor, weight: QuantWeight, plan: Plan | None = None) -> Tensor:
    """x [M, K] bf16 or fp32, contiguous -> [M, N] in x's dtype, summed in float32.

    With a plan of R rows, R a multiple of M: result row r is row r // (R / M) of x times the matrix
    that the plan names for r, [R, N].
    """
    assert x.dim() == 2 and x.shape[1] == weight.num_inputs, _refused(x, weight)
    assert x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous(), _refused(x, weight)
    assert x.device == weight.codes.device, _refused(x, weight)
    if plan is None:
        assert len(weight.codes) == 1, f"{len(weight.codes)} matrices need a plan"
    else:
        assert len(plan.matrix_ids) % max(1, len(x)) == 0, (len(plan.matrix_ids), len(x))
    if x.is_cuda:
        # Triton comes with CUDA builds of torch; no other machine needs it.
        from common.kernels.quant_matmul_triton import launch

        with torch.cuda.device(x.device):  # Triton launches on the current one
            return launch(x, weight, plan)
    return reference(x, weight, plan)


def reference(x: Tensor, weight: QuantWeight, plan: Plan | None = None) -> Tensor:
    """The definition: dequantise in float32, round to x's dtype, multiply."""
    if plan is None:
        return F.linear(x, weight.dequantised(0).to(x.dtype))
    ids = plan.matrix_ids
    x = x.repeat_interleave(len(ids) // max(1, len(x)), 0)
    out = x.new_zeros(len(ids), weight.codes.shape[1])
    for matrix in ids[(ids >= 0) & (ids < len(weight.codes))].unique().tolist():
        rows = ids == matrix
        out[rows] = F.linear(x[rows], weight.dequantised(matrix).to(x.dtype))
    return out


def _refused(x: Tensor, weight: QuantWeight) -> str:
    return (
        f"x {x.dtype} {list(x.shape)} on {x.device} with codes {weight.codes.dtype} "
        f"{list(weight.codes.shape)} on {weight.codes.device}"
    )
