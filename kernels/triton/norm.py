"""Norms of rows, and rounding to 8 bits: one program per row, or per head of it, sums in float32.

RMSNorm (Zhang and Sennrich, 2019), LayerNorm (Ba et al., 2016), and both by heads are one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.inputs import NOT_ROUNDED, Rounded, round_row, row_warps
from qserve.kernels.triton.launch import at

_NARROWEST = 128
"""The least columns of a program. Codes are padded to at most a multiple of this, so they need no more than the row."""


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, stride_out, eps, codes_ptr, scales_ptr, stride_codes, input_scale,
    CENTER: tl.constexpr, ACCUMULATE: tl.constexpr, STATIC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """CENTER subtracts the mean first. A program normalizes the WIDTH numbers of one part of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * WIDTH
    # Eight columns to a thread, with or without codes: so the sum always has the same order.
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * stride_x + part + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + part + columns, mask=inside, other=0.0)
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    value = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
    if bias_ptr is not None:
        value += tl.load(bias_ptr + part + columns, mask=inside, other=0.0)
    at = out_ptr + row * stride_out + part + columns
    if ACCUMULATE:
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = value.to(out_ptr.dtype.element_ty)
    tl.store(at, value, mask=inside)
    if codes_ptr is not None:
        round_row(
            value.to(tl.float32), row, columns, codes_ptr, scales_ptr, stride_codes, input_scale, STATIC, LIMIT
        )


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, eps: float, rows: int, into: Rounded | None = None, *,
    center: bool = False, accumulate: bool = False, parts: int = 1,
) -> None:  # fmt: skip
    """out[:rows] = x[:rows] / sqrt(mean(x ** 2) + eps) * weight + bias, or added to it; weight and bias float32, x and
    out of any float type. x and out may be slices of the columns of wider buffers, or the same.

    ``center``: of x less its mean. ``parts``: each row holds that many equal ones, which are normalized apart.
    ``into``: a row of one part is also stored in 8 bits, as rounding ``out`` would give them.
    """
    width = x.shape[1] // parts
    block = max(_NARROWEST, triton.next_power_of_2(width))
    rounding = NOT_ROUNDED if into is None else into.arguments
    at(norm_kernel, (rows, parts))(
        x, weight, bias, out, x.stride(0), out.stride(0), eps, *rounding[:4], center, accumulate, *rounding[4:], width,
        block, num_warps=row_warps(block),
    )  # fmt: skip
