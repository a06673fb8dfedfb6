"""What is done to inputs before a product: columns put in the order of the weights' groups, and rounding to 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
        # Past 2 ** 23 the last place of float32 is one: adding puts the rounding where it is wanted.
        return ((tl.minimum(tl.maximum(scaled, -128.0), 127.0) + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(DTYPE)


@triton.jit
def _inverse(absmax, LIMIT: tl.constexpr):
    """LIMIT / absmax, or 0 where that would overflow."""
    return tl.where(absmax < 1e-30, 0.0, tl.div_rn(tl.zeros_like(absmax) + LIMIT, tl.maximum(absmax, 1e-30)))


@triton.jit
def round_rows_kernel(
    x, codes, scales, k, stride_x, stride_codes, input_scale,
    STATIC: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row as 8-bit codes, padded with zeros, and its scale: NaN, which spoils the row, where it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + row * stride_x + at, mask=at < k, other=0.0).to(tl.float32)
    magnitude = tl.abs(value)
    finite = magnitude < float("inf")
    absmax = tl.max(tl.where(finite, magnitude, 0.0), 0)
    if STATIC:
        scale = input_scale + tl.zeros_like(absmax)
        inverse = tl.div_rn(tl.zeros_like(absmax) + 1.0, scale)
    else:
        scale = tl.div_rn(absmax, tl.zeros_like(absmax) + LIMIT)
        inverse = _inverse(absmax, LIMIT)
    spoiled = tl.max(tl.where(finite, 0, 1), 0) != 0
    tl.store(scales + row, tl.where(spoiled, float("nan"), scale))
    rounded = _codes(tl.where(finite, value, 0.0) * inverse, codes.dtype.element_ty)
    tl.store(codes + row * stride_codes + at, rounded, mask=at < stride_codes)


@triton.jit
def round_groups_kernel(
    x, codes, scales, k, groups, stride_x, stride_codes,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The same by groups of GROUP inputs; a program rounds COUNT of a row."""
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
    gather_columns_kernel[grid](x, order, out, k, x.stride(0), out.stride(0), WIDTH=_WIDTH, num_warps=4)


def _limit(codes: Tensor) -> float:
    return 127.0 if codes.dtype == torch.int8 else 448.0


def round_rows(x: Tensor, codes: Tensor, scales: Tensor, rows: int, input_scale: float | None) -> None:
    """x [rows, k] as int8 or e4m3 codes [rows, k padded] and scales [rows, 1], as ``reference.round_input`` rounds.

    ``input_scale`` is the scale where it is static.
    """
    width = triton.next_power_of_2(codes.shape[1])
    round_rows_kernel[rows, 1](
        x, codes, scales, x.shape[1], x.stride(0), codes.stride(0), 1.0 if input_scale is None else input_scale,
        STATIC=input_scale is not None, LIMIT=_limit(codes), WIDTH=width,
        num_warps=4 if width <= 4096 else 8 if width <= 8192 else 16,
    )  # fmt: skip


def round_groups(x: Tensor, codes: Tensor, scales: Tensor, rows: int, group: int) -> None:
    """The same with scales [rows, groups], one for ``group`` inputs."""
    groups = scales.shape[1]
    count = max(1, 2048 // triton.next_power_of_2(group))
    round_groups_kernel[rows, -(-groups // count)](
        x, codes, scales, x.shape[1], groups, x.stride(0), codes.stride(0),
        LIMIT=_limit(codes), GROUP=group, COUNT=count, num_warps=4,
    )  # fmt: skip
