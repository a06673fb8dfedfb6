"""RMS normalization of rows (Zhang and Sennrich, 2019): one program per row, sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + columns, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, rows: int) -> None:
    """out[:rows] = x[:rows] / sqrt(mean(x ** 2) + eps) * weight; weight float32, x and out of any float type."""
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](x, weight, out, eps, width, block, num_warps=4 if block <= 4096 else 8)
