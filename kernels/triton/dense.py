"""Products with weights in floating point: cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
    """out [rows, n] = x [rows, k] times weight [n, k] transposed, plus bias [n], plus ``out`` where it accumulates.

    x and weight are of one type, bias and out of another or the same. Written in place where nothing is added.
    """
    if bias is None and not accumulate and out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
        return
    y = F.linear(x, weight).to(out.dtype)
    if bias is not None:
        y += bias
    if accumulate:
        out += y
    else:
        out.copy_(y)
