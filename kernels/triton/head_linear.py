"""Products of heads, each with a weight of its own: ``ops.HeadLinear``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from qserve.kernels.ops import HeadLinear
from qserve.kernels.triton.launch import at

_LEAST = 16  # inputs of a product of a matrix unit


@dataclass(frozen=True)
class HeadTile:
    """``rows`` times ``outs`` of one head in a program, ``inputs`` at a time, ``stages`` of them in flight."""

    rows: int
    outs: int
    warps: int
    inputs: int = 64
    stages: int = 3


FEW = HeadTile(16, 64, 4)
MANY = HeadTile(64, 128, 8)
ALWAYS = HeadTile(64, 64, 4)
"""Where a row's sum must not depend on how many others there are."""


@triton.jit(do_not_specialize=["rows"])
def head_linear_kernel(
    x_ptr, weight_ptr, out_ptr, rows, stride_x, head_x, stride_out, head_out,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    lines = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = (lines < rows)[:, None]
    x_ptr += head * head_x + lines[:, None] * stride_x
    weight_ptr += head * (OUT * IN) + outs[None, :] * IN
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + inputs[None, :], mask=real & (inputs < IN)[None, :], other=0.0)
        weight = tl.load(
            weight_ptr + inputs[:, None], mask=(inputs < IN)[:, None] & (outs < OUT)[None, :], other=0.0
        )
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    out_ptr += head * head_out + lines[:, None] * stride_out + outs[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=real & (outs < OUT)[None, :])


def constants(op: HeadLinear, tile: HeadTile) -> dict[str, Any]:
    """The constants that the kernel is specialized for."""
    _, out, inp = op.weight.shape
    inputs = max(_LEAST, min(tile.inputs, triton.next_power_of_2(inp)))
    return {"IN": inp, "OUT": out, "BLOCK_M": tile.rows, "BLOCK_N": tile.outs, "BLOCK_K": inputs}


def head_linear(op: HeadLinear, rows: int, *, invariant: bool = False) -> None:
    """``op`` for the first ``rows``; x and weight have one dtype."""
    tile = ALWAYS if invariant else FEW if rows <= FEW.rows else MANY
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(op.weight.shape[1], tile.outs), op.heads
    at(head_linear_kernel, grid)(
        op.x, op.weight, op.out, rows, op.x.stride(0), op.x.stride(1), op.out.stride(0), op.out.stride(1),
        **constants(op, tile), num_warps=tile.warps, num_stages=tile.stages,
    )
