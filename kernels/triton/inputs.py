"""Preparing inputs before a product: columns in the order of the weights' groups, and rounding to 8 bits.

A kernel that makes a whole row can round it at once (``Rounded``, ``round_row``). The bits are those that
``round_rows`` makes of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

_WIDTH = 1024


@triton.jit
def gather_columns_kernel(x, order, out, k, stride_x, stride_out, WIDTH: tl.constexpr):
    """out[r, i] = x[r, order[i]], or 0 where order is -1."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    column = tl.load(order + at, mask=at < k, other=-1)
    value = tl.load(x + row * stride_x + column, mask=column >= 0, other=0.0)
    tl.store(out + row * stride_out + at, value, mask=at < k)


@triton.jit
def _codes(scaled, DTYPE: tl.constexpr):
    """Numbers as int8, half to even and saturated, or as e4m3."""
    if tl.int8 == DTYPE:
        # From 2 ** 23 on, float32 has no bits below one: adding the constant rounds to an integer.
        return ((tl.minimum(tl.maximum(scaled, -128.0), 127.0) + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(DTYPE)


@triton.jit
def _inverse(absmax, LIMIT: tl.constexpr):
    """LIMIT / absmax, or 0 where that would overflow."""
    return tl.where(absmax < 1e-30, 0.0, tl.div_rn(tl.zeros_like(absmax) + LIMIT, tl.maximum(absmax, 1e-30)))


@triton.jit
def round_row(value, row, at, codes, scales, stride_codes, input_scale, STATIC: tl.constexpr, LIMIT: tl.constexpr):
    """Store a row as 8-bit codes, padded with zeros, and its scale. ``value`` is float32 at columns ``at``, zero behind
    the row's end. A row that is not finite gets the scale NaN, which spoils it."""
    finite, spoiled = _finite(value)
    absmax = tl.max(tl.abs(finite), 0)
    inverse = _scale_row(absmax, tl.max(spoiled, 0), scales + row, input_scale, STATIC, LIMIT)
    tl.store(codes + row * stride_codes + at, _codes(finite * inverse, codes.dtype.element_ty), mask=at < stride_codes)


@triton.jit
def _finite(value):
    """The numbers, 0 in place of those that are not finite; and 1 where they are not."""
    finite = tl.abs(value) < float("inf")
    return tl.where(finite, value, 0.0), tl.where(finite, 0, 1)


@triton.jit
def _scale_row(absmax, spoiled, scale_ptr, input_scale, STATIC: tl.constexpr, LIMIT: tl.constexpr):
    """Store the scale of a row; returns the factor that turns its numbers into codes."""
    if STATIC:
        scale = input_scale + tl.zeros_like(absmax)
        inverse = tl.div_rn(tl.zeros_like(absmax) + 1.0, scale)
    else:
        scale = tl.div_rn(absmax, tl.zeros_like(absmax) + LIMIT)
        inverse = _inverse(absmax, LIMIT)
    tl.store(scale_ptr, tl.where(spoiled != 0, float("nan"), scale))
    return inverse


@triton.jit
def round_rows_kernel(
    x, k, stride_x, codes, scales, stride_codes, input_scale,
    STATIC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of at most WIDTH, read once where it is one BLOCK, else twice."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if WIDTH == BLOCK:
        value = tl.load(x + row * stride_x + at, mask=at < k, other=0.0).to(tl.float32)
        round_row(value, row, at, codes, scales, stride_codes, input_scale, STATIC, LIMIT)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        bad = tl.zeros([BLOCK], tl.int32)
        for start in range(0, WIDTH, BLOCK):
            value = tl.load(x + row * stride_x + start + at, mask=start + at < k, other=0.0).to(tl.float32)
            finite, spoiled = _finite(value)
            largest = tl.maximum(largest, tl.abs(finite))
            bad = tl.maximum(bad, spoiled)
        inverse = _scale_row(tl.max(largest, 0), tl.max(bad, 0), scales + row, input_scale, STATIC, LIMIT)
        for start in range(0, WIDTH, BLOCK):
            value = tl.load(x + row * stride_x + start + at, mask=start + at < k, other=0.0).to(tl.float32)
            finite, spoiled = _finite(value)
            code = _codes(finite * inverse, codes.dtype.element_ty)
            tl.store(codes + row * stride_codes + start + at, code, mask=start + at < stride_codes)


@triton.jit
def round_groups_kernel(
    x, codes, scales, k, groups, stride_x, stride_codes,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Like ``round_rows_kernel``, by groups of GROUP inputs; a program rounds COUNT groups of a row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row * stride_x + at, mask=at < k, other=0.0).to(tl.float32)
    magnitude = tl.abs(value)
    finite = magnitude < float("inf")
    absmax = tl.max(tl.where(finite, magnitude, 0.0), 1)
    scale = tl.div_rn(absmax, tl.zeros_like(absmax) + LIMIT)
    spoiled = tl.max(tl.where(finite, 0, 1), 1) != 0
    tl.store(scales + row * groups + group, tl.where(spoiled, float("nan"), scale), mask=group < groups)
    rounded = _codes(tl.where(finite, value, 0.0) * _inverse(absmax, LIMIT)[:, None], codes.dtype.element_ty)
    tl.store(codes + row * stride_codes + at, rounded, mask=at < stride_codes)


def gather_columns(x: Tensor, order: Tensor, out: Tensor, rows: int) -> None:
    """out [rows, k] from the columns of x that ``order`` int32 [k] names; -1 is a column of zeros."""
    k = len(order)
    grid = (rows, -(-k // _WIDTH))
    at(gather_columns_kernel, grid)(x, order, out, k, x.stride(0), out.stride(0), WIDTH=_WIDTH, num_warps=4)


@dataclass(frozen=True)
class Rounded:
    """Memory for rows rounded to 8 bits: ``codes`` int8 or e4m3 [rows, k padded] and ``scales`` float32 [rows, 1].
    ``input_scale`` is the scale where it is static."""

    codes: Tensor
    scales: Tensor
    input_scale: float | None

    @property
    def arguments(self) -> tuple[Tensor | None, Tensor | None, int, float, bool, float]:
        """As kernels take them: codes, scales, stride_codes, input_scale, STATIC and LIMIT."""
        scale = 1.0 if self.input_scale is None else self.input_scale
        return self.codes, self.scales, self.codes.stride(0), scale, self.input_scale is not None, _limit(self.codes)


NOT_ROUNDED: tuple[Tensor | None, Tensor | None, int, float, bool, float] = (None, None, 0, 1.0, False, 0.0)
"""The same arguments of a kernel whose row is not rounded."""


def _limit(codes: Tensor) -> float:
    return 127.0 if codes.dtype == torch.int8 else 448.0


WIDEST_ROW = 16384
"""The widest row that the registers of a program hold."""


def row_block(width: int) -> int:
    """Columns that a program rounds at a time: a whole row, or pieces that leave registers for the rest."""
    return width if width <= WIDEST_ROW else WIDEST_ROW // 2


def row_warps(width: int) -> int:
    """Warps of a program that holds a row of ``width``."""
    return 4 if width <= 4096 else 8 if width <= 8192 else 16


def round_rows(x: Tensor, into: Rounded, rows: int) -> None:
    """Round x [rows, k] to 8 bits, as ``reference.round_input`` does."""
    width = triton.next_power_of_2(into.codes.shape[1])
    block = row_block(width)
    at(round_rows_kernel, (rows, 1))(
        x, x.shape[1], x.stride(0), *into.arguments, width, block, num_warps=row_warps(block)
    )


def round_groups(x: Tensor, codes: Tensor, scales: Tensor, rows: int, group: int) -> None:
    """The same with scales [rows, groups], one for ``group`` inputs."""
    groups = scales.shape[1]
    count = max(1, 2048 // triton.next_power_of_2(group))
    at(round_groups_kernel, (rows, -(-groups // count)))(
        x, codes, scales, x.shape[1], groups, x.stride(0), codes.stride(0),
        LIMIT=_limit(codes), GROUP=group, COUNT=count, num_warps=4,
    )  # fmt: skip
