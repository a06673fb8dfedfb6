"""Logits into log-probabilities, in place: one program per row, three passes over what stays in the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

BLOCK = 4096


@triton.jit
def log_softmax_kernel(x_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = x_ptr + tl.program_id(0).to(tl.int64) * WIDTH
    lanes = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        x = tl.load(row + start + lanes, mask=start + lanes < WIDTH, other=float("-inf"))
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        total += tl.exp(tl.load(row + start + lanes, mask=start + lanes < WIDTH, other=float("-inf")) - top)
    shift = top + tl.log(tl.sum(total, 0))
    for start in range(0, WIDTH, BLOCK):
        inside = start + lanes < WIDTH
        x = tl.load(row + start + lanes, mask=inside, other=0.0)
        tl.store(row + start + lanes, x - shift, mask=inside)


def log_softmax(x: Tensor, rows: int) -> None:
    """x[:rows] (float32) becomes its log-softmax."""
    width = x.shape[1]
    at(log_softmax_kernel, (rows,))(x, width, min(BLOCK, triton.next_power_of_2(width)), num_warps=8)
