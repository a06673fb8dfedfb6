"""GPTQ's pass over the inputs of a weight, a few inputs at a time: ``kernels.rounding.sweep`` is that of the CPU.

Between two launches a matrix product makes up for the errors so far, see ``quantize.sweep``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

COLUMNS = 32
"""The most inputs of a launch."""
_OUTPUTS = 32  # of a program, which is one warp: no step waits for another warp


@triton.jit
def _nearest(x):
    """The nearest integer to each, half to even."""
    # From 2 ** 23 on, float32 has no bits below one: adding the constant rounds to an integer.
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["first", "count"])
def round_columns_kernel(
    left, aims, error, codes, upper, scales, zeros, groups, first, count, inputs, outputs, zero, max_code,
    AIMS: tl.constexpr, ZEROS: tl.constexpr, E2M1: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Rounds the inputs ``first`` .. ``first`` + ``count``. All but these are transposed: an input is a row.

    left float32 [inputs, outputs], what is to be rounded; aims likewise, or AIMS is false and errors are counted from
    what is rounded; upper float32 [inputs, inputs]; scales, zeros float32 [groups, outputs]; groups int32 [inputs].
    Written: error float32 and codes uint8 [inputs, outputs].
    """
    outs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outs < outputs
    columns = tl.arange(0, COLUMNS)
    places = (first + columns)[:, None].to(tl.int64) * outputs + outs[None, :]
    there = (columns < count)[:, None] & inside[None, :]
    tile = tl.load(left + places, mask=there, other=0.0)
    for column in range(count):
        row = first + column
        own = row.to(tl.int64) * outputs + outs
        value = tl.sum(tl.where((columns == column)[:, None], tile, 0.0), 0)
        group = tl.load(groups + row).to(tl.int64) * outputs + outs
        scale = tl.load(scales + group, mask=inside, other=1.0)
        steps = tl.div_rn(value, scale)
        if E2M1:
            size = tl.minimum(tl.abs(steps), 6.0)
            size = tl.where(size == size, size, 6.0)  # what is not a number counts as 6
            unit = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
            size = _nearest(size / unit) * unit
            code = tl.where(size < 2.0, 2.0 * size, tl.where(size < 4.0, size + 2.0, size * 0.5 + 4.0))
            code = tl.where((steps < 0.0) & (size > 0.0), code + 8.0, code)
            rounded = tl.where(steps < 0.0, -size, size)
        else:
            offset = zero
            if ZEROS:
                offset = tl.load(zeros + group, mask=inside, other=0.0)
            code = tl.minimum(tl.maximum(_nearest(tl.minimum(tl.maximum(steps, -1e6), 1e6)) + offset, 0.0), max_code)
            rounded = code - offset
        tl.store(codes + own, code.to(tl.uint8), mask=inside)
        aim = value
        if AIMS:
            aim = tl.load(aims + own, mask=inside, other=0.0)
        reach = upper + row.to(tl.int64) * inputs + first
        lost = tl.div_rn(aim - rounded * scale, tl.zeros_like(aim) + tl.load(reach + column))
        tl.store(error + own, lost, mask=inside)
        ahead = tl.load(reach + columns, mask=(columns > column) & (columns < count), other=0.0)
        tile -= ahead[:, None] * lost[None, :]


def round_columns(
    left: Tensor,
    aims: Tensor | None,
    error: Tensor,
    codes: Tensor,
    upper: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor,
    columns: range,
    *,
    zero: int,
    max_code: int,
    e2m1: bool,
) -> None:
    """Launch ``round_columns_kernel`` for at most ``COLUMNS`` consecutive inputs. All tensors are contiguous."""
    inputs, outputs = left.shape
    with torch.cuda.device_of(left):  # Triton launches on the current device, which may be another GPU
        at(round_columns_kernel, (-(-outputs // _OUTPUTS),))(
            left, aims, error, codes, upper, scales, zeros, groups, columns.start, len(columns), inputs, outputs,
            float(zero), float(max_code), AIMS=aims is not None, ZEROS=zeros is not None, E2M1=e2m1, COLUMNS=COLUMNS,
            OUTPUTS=_OUTPUTS, num_warps=1,
        )  # fmt: skip
