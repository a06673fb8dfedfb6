"""RMS normalization of rows (Zhang and Sennrich, 2019), and rounding to 8 bits: one program per row, sums in float32.

The residual was added before: the product that makes it accumulates into the row.
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
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, codes_ptr, scales_ptr, stride_codes, input_scale,
    STATIC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Eight columns to a thread, with or without codes: so the sum always has the same order.
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    value = (x * inverse * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, value, mask=inside)
    if codes_ptr is not None:
        round_row(
            value.to(tl.float32), row, columns, codes_ptr, scales_ptr, stride_codes, input_scale, STATIC, LIMIT
        )


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, rows: int, into: Rounded | None = None) -> None:
    """out[:rows] = x[:rows] / sqrt(mean(x ** 2) + eps) * weight; weight float32, x and out of any float type.

    ``into``: the same row is also stored in 8 bits, as rounding ``out`` would give them.
    """
    width = x.shape[1]
    block = max(_NARROWEST, triton.next_power_of_2(width))
    rounding = NOT_ROUNDED if into is None else into.arguments
    at(rms_norm_kernel, (rows,))(x, weight, out, eps, *rounding, width, block, num_warps=row_warps(block))
