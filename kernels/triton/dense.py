"""Products with weights in floating point: cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
    """out [rows, n] = x [rows, k] times weight [n, k] transposed, plus bias [n], plus ``out`` where it accumulates.

    x and weight have one dtype, bias and out the same or another; float32 is never rounded to fewer bits. The product
    itself stores its sums, or adds them to ``out``.
    """
    if out.dtype == x.dtype and accumulate:
        torch.addmm(out, x, weight.t(), out=out)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif not x.is_cuda:  # CPU products return the dtype of their inputs
        y = torch.mm(x.to(out.dtype), weight.t().to(out.dtype))
        out.copy_(out + y if accumulate else y)
    elif accumulate:
        torch.addmm(out, x, weight.t(), out_dtype=out.dtype, out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    if bias is not None:
        out += bias
