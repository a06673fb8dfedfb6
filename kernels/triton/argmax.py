"""The first index of the largest value of a row: one program per row, over the vocabulary in pieces."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

BLOCK = 4096


@triton.jit
def argmax_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = lanes  # of a row that is -inf throughout, the first
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + lanes
        x = tl.load(x_ptr + row * WIDTH + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        bad = tl.where(x != x, 1, bad)
        better = x > best  # not for equals: the earlier one stays
        best = tl.where(better, x, best)
        index = tl.where(better, columns, index)
    first = tl.min(tl.where(best == tl.max(best, 0), index, WIDTH), 0)
    tl.store(out_ptr + row, tl.where(tl.max(bad, 0) > 0, -1, first))


def argmax(x: Tensor, out: Tensor, rows: int) -> None:
    """out[r] (int32) = the first index of the largest of x[r], or -1 where the row holds a NaN."""
    width = x.shape[1]
    at(argmax_kernel, (rows,))(x, out, width, min(BLOCK, triton.next_power_of_2(width)), num_warps=8)
