"""What is done to inputs before a product: columns put in the order of the weights' groups, and rounding to 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 1024


@triton.jit
def gather_columns_kernel(x, order, out, k, stride_x, stride_out, WIDTH: tl.constexpr):
    """out[r, i] = x[r, order[i]], or 0 where order is -1."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    column = tl.load(order + at, mask=at < k, other=-1)
    value = tl.load(x + row * stride_x + column, mask=column >= 0, other=0.0)
    tl.store(out + row * stride_out + at, value, mask=at < k)


def gather_columns(x: Tensor, order: Tensor, out: Tensor, rows: int) -> None:
    """out [rows, k] from the columns of x that ``order`` int32 [k] names; -1 is a column of zeros."""
    k = len(order)
    gather_columns_kernel[rows, -(-k // _WIDTH)](x, order, out, k, x.stride(0), out.stride(0), WIDTH=_WIDTH, num_warps=4)
