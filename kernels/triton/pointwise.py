"""What is computed number by number, in float32: activations, gates, caps, and the dtype of the residual stream.

One program per piece of a row, or per row where an activation is rounded to 8 bits as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qserve.kernels.ops import Activation, SigmoidMul, SoftCap
from qserve.kernels.triton.inputs import NOT_ROUNDED, Rounded, round_row, row_warps
from qserve.kernels.triton.launch import at

BLOCK = 1024


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """To within 2e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _function(x, FUNCTION: tl.constexpr):
    """One of ``ops.Function``."""
    if FUNCTION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif FUNCTION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # 0.5 * (1 + tanh(y)) is the sigmoid of 2 * y
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == "swigluoai":
        y = tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return y / (1.0 + tl.exp(-1.702 * y))
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive if FUNCTION == "relu2" else positive


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, codes_ptr, scales_ptr, stride_codes, input_scale,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = x_ptr + row * (2 * WIDTH if GATED else WIDTH) + columns
    value = _function(tl.load(at, mask=inside, other=0.0).to(tl.float32), FUNCTION)
    if GATED:
        factor = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
        if FUNCTION == "swigluoai":
            factor = tl.clamp(factor, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        value *= factor
    value = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, value, mask=inside)
    if codes_ptr is not None:
        round_row(
            value.to(tl.float32), row, columns, codes_ptr, scales_ptr, stride_codes, input_scale, STATIC, LIMIT
        )


@triton.jit
def sigmoid_mul_kernel(gate_ptr, out_ptr, GATES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if GATES == 1:
        gate = tl.load(gate_ptr + row).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + row * WIDTH + columns
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * sigmoid(gate)
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def soft_cap_kernel(x_ptr, CAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = x_ptr + row * WIDTH + columns
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (CAP * tanh(x / CAP)).to(x_ptr.dtype.element_ty), mask=inside)


def activation(op: Activation, rows: int, into: Rounded | None = None) -> None:
    """``into``: the rows of ``op.out`` are also stored in 8 bits, as rounding them would give."""
    width = op.width
    rounding = NOT_ROUNDED if into is None else into.arguments
    block = BLOCK if into is None else triton.next_power_of_2(into.codes.shape[1])
    at(activation_kernel, (rows, triton.cdiv(width, block)))(
        op.x, op.out, *rounding[:4], op.function, op.gated, *rounding[4:], width, block,
        num_warps=4 if into is None else row_warps(block),
    )  # fmt: skip


def sigmoid_mul(op: SigmoidMul, rows: int) -> None:
    grid = (rows, triton.cdiv(op.width, BLOCK))
    at(sigmoid_mul_kernel, grid)(op.gate, op.out, op.gates, op.width, BLOCK, num_warps=4)


def soft_cap(op: SoftCap, rows: int) -> None:
    at(soft_cap_kernel, (rows, triton.cdiv(op.width, BLOCK)))(op.x, op.cap, op.width, BLOCK, num_warps=4)
