"""Rows of a matrix by their number: one program per piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

BLOCK = 1024


@triton.jit
def gather_kernel(x_ptr, rows_ptr, out_ptr, SCALE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows_ptr + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + source * WIDTH + columns, mask=inside, other=0.0)
    if SCALE != 1.0:
        x = x.to(tl.float32) * SCALE
    tl.store(out_ptr + row * WIDTH + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def gather(x: Tensor, numbers: Tensor, out: Tensor, rows: int, scale: float = 1.0) -> None:
    """out[i] = x[numbers[i]] * scale for i < rows; numbers int32. Dense embeddings are looked up by it too."""
    width = out.shape[1]
    at(gather_kernel, (rows, triton.cdiv(width, BLOCK)))(x, numbers, out, scale, width, BLOCK, num_warps=4)
