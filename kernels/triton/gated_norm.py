"""The RMS norm of heads, times a weight and SiLU of a gate: what is behind the recurrence of ``ops.GatedDelta``.

One program for some heads of a row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

_HEADS = 8  # of a program


@triton.jit
def gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * EACH + tl.arange(0, EACH), tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
    columns = heads[:, None] * DIM + dims[None, :]
    x = tl.load(x_ptr + row * (HEADS * DIM) + columns, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0)
    value = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * weight[None, :]
    value *= gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * (HEADS * DIM) + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def constants(heads: int, dim: int) -> dict[str, Any]:
    """The constants that the kernel is specialized for."""
    each = min(_HEADS, triton.next_power_of_2(heads))
    return {"HEADS": heads, "DIM": dim, "EACH": each, "BLOCK": triton.next_power_of_2(dim)}


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, out: Tensor, eps: float, rows: int) -> None:
    """For the first ``rows`` of x float32 [rows, heads, dim]; gate, a slice of the columns of a wider buffer, and out
    [rows, heads * dim]; weight float32 [dim]."""
    known = constants(*x.shape[1:])
    at(gated_norm_kernel, (rows, triton.cdiv(known["HEADS"], known["EACH"])))(
        x, gate, weight, out, gate.stride(0), eps, **known, num_warps=4
    )
