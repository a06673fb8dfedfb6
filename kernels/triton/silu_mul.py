"""silu(gate) * up, in float32: one program per piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = gate_up_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor, rows: int) -> None:
    """out[:rows] = silu(gate) * up, where gate_up [rows, 2 * width] holds both."""
    width = out.shape[1]
    silu_mul_kernel[(rows, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK, num_warps=4)
