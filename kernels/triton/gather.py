"""Rows of a matrix by their number: one program per piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

BLOCK = 1024


@triton.jit
def gather_kernel(
    x_ptr, rows_ptr, out_ptr, stride_x, stride_out, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    ACCUMULATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row).to(tl.int64) + OFFSET
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + source * stride_x + columns, mask=inside, other=0.0)
    if SCALE != 1.0:
        x = x.to(tl.float32) * SCALE
    at = out_ptr + row * stride_out + columns
    if ACCUMULATE:
        x = x.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inside)


def gather(
    x: Tensor, numbers: Tensor | None, out: Tensor, rows: int, scale: float = 1.0, offset: int = 0, *,
    accumulate: bool = False,
) -> None:  # fmt: skip
    """out[i] = x[numbers[i] + offset] * scale for i < rows, or added to it; numbers int32, None for 0, 1, 2, ... Dense
    embeddings are looked up by it too, and rows change their dtype. x and out may be slices of the columns of wider
    buffers."""
    grid = (rows, triton.cdiv(out.shape[1], BLOCK))
    at(gather_kernel, grid)(
        x, numbers, out, x.stride(0), out.stride(0), scale, offset, accumulate, out.shape[1], BLOCK, num_warps=4
    )
