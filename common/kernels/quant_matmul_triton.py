"""The Triton kernel behind `quant_matmul`, and its launch.

A program takes a tile of W's rows and a tile of x's rows. Codes become real numbers in registers,
right where the tensor cores read them: W is the left operand, x the right one, so that few rows of
x make a narrow tile and not an empty one. Which tiles a launch takes follows from shapes only, so a
row's result depends neither on the other rows nor on chance. Written for Triton 3.6 and later;
float32 x is multiplied without tensor cores, exactly. Knows nothing of what the matrices are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.quant_matmul import Plan, rows_per_tile
from common.loading.block_quant import E8M0, QuantWeight

ENOUGH_PROGRAMS = 256  # what fills a large GPU (132 multiprocessors) about twice
MAX_SPLITS = 8


class Tiles(NamedTuple):
    """What one program computes."""

    x_rows: int
    w_rows: int
    inputs: int  # per step of the sum
    num_splits: int = 1  # programs that share one sum
    num_warps: int = 4


def tiles_for(x: Tensor, weight: QuantWeight, plan: Plan | None) -> Tiles:
    """Depends on shapes and dtypes only."""
    x_rows = plan.rows_per_tile if plan else rows_per_tile(len(x))
    if x.dtype == torch.float32:  # long unrolled sums; for comparisons, not for speed
        return Tiles(min(x_rows, 32), 32, 32) if plan is None else Tiles(x_rows, 32, 32)
    if x_rows == 128:
        return Tiles(128, 128, 64, num_warps=8)
    tiles = Tiles(x_rows, 64, 128)
    num_programs = -(-weight.codes.shape[1] // tiles.w_rows)
    num_splits = 1
    if plan is None and len(x) <= x_rows:
        while (
            num_splits < MAX_SPLITS
            and num_programs * num_splits < ENOUGH_PROGRAMS
            and weight.num_inputs >= 4 * num_splits * tiles.inputs
        ):
            num_splits *= 2
    return tiles._replace(num_splits=num_splits)


def launch(
    x: Tensor, weight: QuantWeight, plan: Plan | None = None, tiles: Tiles | None = None
) -> Tensor:
    """See `quant_matmul`, which checks what comes in here. tiles: instead of the usual ones."""
    tiles = tiles or tiles_for(x, weight, plan)
    assert plan is None or tiles.x_rows == plan.rows_per_tile, f"{tiles}, {plan}"
    num_rows = len(x) if plan is None else len(plan.matrix_ids)
    num_outputs, num_inputs = weight.codes.shape[1], weight.num_inputs
    splits, e8m0 = tiles.num_splits, weight.scales.dtype == E8M0
    # Parts of a sum stay in float32 until they meet, in a fixed order.
    dtype = x.dtype if splits == 1 else torch.float32
    new = x.new_empty if plan is None else x.new_zeros  # a plan may leave rows out
    out = new((splits, num_rows, num_outputs), dtype=dtype)
    if num_rows == 0:
        return out[0].to(x.dtype)
    order = route = None
    row_tiles = -(-num_rows // tiles.x_rows)
    if plan is not None:
        order, route = plan.order, plan.matrix_ids if plan.tiles is None else plan.tiles
        row_tiles = len(route)
    per_split = -(-num_inputs // (splits * tiles.inputs)) * tiles.inputs
    quant_matmul_kernel[(-(-num_outputs // tiles.w_rows), row_tiles, splits)](
        x,
        weight.codes,
        weight.scales.view(torch.uint8) if e8m0 else weight.scales,
        weight.row_factors,
        order,
        route,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        weight.scales.shape[2],
        len(weight.codes),
        num_rows // len(x),
        per_split,
        GROUP=weight.group,
        PACKED=weight.packed,
        E8M0=e8m0,
        BM=tiles.x_rows,
        BN=tiles.w_rows,
        BK=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return out[0] if splits == 1 else out.sum(0).to(x.dtype)


@triton.jit
def _e8m0_to_float(byte):  # type: ignore[no-untyped-def]
    """2^(byte - 127): byte 0 is below the normal numbers, byte 255 is NaN."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_to_float(nibble, copies: tl.constexpr):  # type: ignore[no-untyped-def]
    """nibble: uint32, all other bits 0. copies: puts it at bits 22 and 28 in one multiplication.

    There the sign is float32's sign, and exponent and mantissa are float32's but for 126 powers.
    """
    bits = (nibble * copies) & 0x81C00000
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit(do_not_specialize=["num_rows"])
def quant_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scales_ptr,
    factors_ptr,  # or None
    order_ptr,  # or None
    route_ptr,  # tiles if there is an order, else a matrix per row, or None: one matrix for all
    out_ptr,
    num_rows,
    N,
    K,
    num_groups,
    num_matrices,
    repeat,  # rows of the result per row of x
    per_split,  # inputs that one program sums; a multiple of BK
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    E8M0: tl.constexpr,  # else e4m3
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_exists = n < N
    at = tl.arange(0, BM)
    w_row = n.to(tl.int64)
    if route_ptr is None:
        row = tl.program_id(1) * BM + at
        row_exists = row < num_rows
    elif order_ptr is None:
        matrix = tl.load(route_ptr + tl.program_id(1))
        if (matrix < 0) | (matrix >= num_matrices):
            return
        row = tl.program_id(1) + at
        row_exists = at == 0
        w_row += matrix * N
    else:
        tile = route_ptr + tl.program_id(1) * 3
        first = tl.load(tile + 1)
        end = tl.load(tile + 2)
        if first >= end:
            return
        row_exists = first + at < end
        row = tl.load(order_ptr + first + at, mask=row_exists, other=0)
        w_row += tl.load(tile).to(tl.int64) * N
    x_row = x_ptr + (row // repeat).to(tl.int64) * K
    acc = tl.zeros((BN, BM), tl.float32)
    begin = tl.program_id(2) * per_split
    for k in range(begin, tl.minimum(begin + per_split, K), BK):
        inputs = k + tl.arange(0, BK)
        x = tl.load(
            x_row[None, :] + inputs[:, None],
            mask=row_exists[None, :] & (inputs < K)[:, None],
            other=0.0,
        )
        if PACKED:
            byte = k // 2 + tl.arange(0, BK // 2)
            codes = tl.load(
                codes_ptr + w_row[:, None] * (K // 2) + byte[None, :],
                mask=n_exists[:, None] & (byte < K // 2)[None, :],
                other=0,
            ).to(tl.uint32)
            low = _e2m1_to_float(codes & 0x0F, (1 << 22) + (1 << 28))
            high = _e2m1_to_float(codes & 0xF0, (1 << 18) + (1 << 24))
            w = tl.join(low, high).reshape(BN, BK)
        else:
            w = tl.load(
                codes_ptr + w_row[:, None] * K + inputs[None, :],
                mask=n_exists[:, None] & (inputs < K)[None, :],
                other=0.0,
            )
        NUM: tl.constexpr = BK // GROUP if BK > GROUP else 1
        groups = k // GROUP + tl.arange(0, NUM)
        scale_ptr = scales_ptr + w_row[:, None] * num_groups + groups[None, :]
        scale_exists = n_exists[:, None] & (groups < num_groups)[None, :]
        if E8M0:
            scales = _e8m0_to_float(tl.load(scale_ptr, mask=scale_exists, other=0))
        else:
            scales = tl.load(scale_ptr, mask=scale_exists, other=0.0).to(tl.float32)
        if BK > GROUP:
            w = (w.to(tl.float32).reshape(BN, NUM, GROUP) * scales[:, :, None]).reshape(BN, BK)
            acc = tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")
        else:  # one scale per row and step: on the sum, which is shorter
            acc += tl.dot(w.to(x.dtype), x, input_precision="ieee") * scales
    if factors_ptr is not None:
        acc *= tl.load(factors_ptr + w_row, mask=n_exists, other=0.0)[:, None]
    out_row = (tl.program_id(2) * num_rows + row).to(tl.int64) * N
    tl.store(
        out_ptr + out_row[None, :] + n[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=n_exists[:, None] & row_exists[None, :],
    )
