"""silu(gate) * up, in float32: one program per piece of a row, or per row where it is rounded to 8 bits as well."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.inputs import NOT_ROUNDED, Rounded, round_row, row_warps
from qserve.kernels.triton.launch import at

BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    gate_up_ptr, out_ptr, codes_ptr, scales_ptr, stride_codes, input_scale,
    STATIC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = gate_up_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, value, mask=inside)
    if codes_ptr is not None:
        round_row(
            value.to(tl.float32), row, columns, codes_ptr, scales_ptr, stride_codes, input_scale, STATIC, LIMIT
        )


def silu_mul(gate_up: Tensor, out: Tensor, rows: int, into: Rounded | None = None) -> None:
    """out[:rows] = silu(gate) * up, where gate_up [rows, 2 * width] holds both.

    ``into``: the same row is also stored in 8 bits, as rounding ``out`` would give them.
    """
    width = out.shape[1]
    if into is None:
        at(silu_mul_kernel, (rows, triton.cdiv(width, BLOCK)))(gate_up, out, *NOT_ROUNDED, width, BLOCK, num_warps=4)
    else:
        block = triton.next_power_of_2(into.codes.shape[1])
        at(silu_mul_kernel, (rows, 1))(gate_up, out, *into.arguments, width, block, num_warps=row_warps(block))
