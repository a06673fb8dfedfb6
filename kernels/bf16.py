"""What calibration computes in bfloat16 beside linears, with sums in float32: second moments and causal attention.

Knows how work is packed; does not know what the results are for. See ``csrc/qserve.h``.
"""

from __future__ import annotations

import ctypes as C
from functools import cache, partial

import torch
from torch import Tensor

from qserve.kernels import abi, native
from qserve.kernels.threads import share

_PANEL = 64
# Rows that are packed together: enough that threads seldom meet, few enough for the last-level cache.
_ROWS = 2048


@cache
def has_bf16() -> bool:
    """Whether this machine has the kernels: AVX512-BF16, and the C library was built."""
    return native.missing() is None and bool(native.library().qs_has_bf16())


def add_moment(
    out: Tensor,
    right: Tensor,
    left: Tensor | None = None,
    *,
    keep: float,
    gain: float,
    magnitudes: tuple[Tensor, Tensor] | None = None,
    threads: int | None = None,
) -> None:
    """``out = keep * out + gain * left^T right``, in place; ``left`` None is ``right``, and then only what lies on or
    above the diagonal of ``out`` is right afterwards.

    out float32 [left's width, right's width], contiguous; left and right [rows, width], rounded to bfloat16.
    ``magnitudes`` float32 [width] each: the largest of each column of ``right`` so far, and their sum, both updated.
    The result does not depend on the number of threads.
    """
    rows, width = right.shape
    height = width if left is None else left.shape[1]
    if out.shape != (height, width) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"moments of {height} by {width} columns do not go into {out.dtype} {tuple(out.shape)}")
    if left is not None and len(left) != rows:
        raise ValueError(f"{len(left)} rows have no product with {rows}")
    most, total = magnitudes or (None, None)
    across, down = -(-width // _PANEL), -(-height // _PANEL)
    tiles = across * (across + 1) // 2 if left is None else across * down
    pairs = (min(rows, _ROWS) + 1) // 2
    panels = [across] if left is None else [across, down]
    packed = [torch.empty(each, pairs, _PANEL, 2, dtype=torch.bfloat16) for each in panels]
    for start in range(0, rows, _ROWS):
        stop = min(start + _ROWS, rows)
        _pack(right[start:stop], packed[0], most, total, threads)
        if left is not None:
            _pack(left[start:stop], packed[1], None, None, threads)
        op = abi.Moment(
            left=packed[-1].data_ptr(), right=packed[0].data_ptr(), out=out.data_ptr(), height=height, width=width,
            pairs=(stop - start + 1) // 2, upper=int(left is None), keep=keep if start == 0 else 1.0, gain=gain,
        )  # fmt: skip
        share(partial(native.library().qs_add_moment, C.byref(op)), tiles, threads)


def _pack(rows: Tensor, packed: Tensor, most: Tensor | None, total: Tensor | None, threads: int | None) -> None:
    rows = _readable(rows)
    op = abi.Pack(
        rows=rows.data_ptr(), packed=packed.data_ptr(), stride=rows.stride(0), count=len(rows), width=rows.shape[1],
        dtype=abi.DTYPES[rows.dtype], absmax=None if most is None else most.data_ptr(),
        abssum=None if total is None else total.data_ptr(),
    )  # fmt: skip
    share(partial(native.library().qs_pack_pairs, C.byref(op)), len(packed), threads)


def attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, threads: int | None = None
) -> Tensor:
    """Causal attention of each sequence, bfloat16 [batch, heads, tokens, head_dim] (a view of [batch, tokens, ...]).

    queries [batch, heads, tokens, head_dim]; keys and values [batch, kv_heads, tokens, head_dim], head_dim even; they
    are rounded to bfloat16. The result does not depend on the number of threads.
    """
    batch, heads, tokens, dim = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape != (batch, kv_heads, tokens, dim) or values.shape != keys.shape or heads % kv_heads or dim % 2:
        raise ValueError(f"no attention of {list(queries.shape)} to {list(keys.shape)} and {list(values.shape)}")
    given = [_readable(each) for each in (queries, keys, values)]
    out = torch.empty(batch, tokens, heads, dim, dtype=torch.bfloat16)
    described = [abi.Heads(each.data_ptr(), *each.stride()[:3], abi.DTYPES[each.dtype]) for each in given]
    op = abi.Causal(*described, out.data_ptr(), heads, kv_heads, tokens, dim, scale)
    if any(share(partial(native.library().qs_attend_causal, C.byref(op)), batch * kv_heads, threads)):
        raise MemoryError("no memory for attention")
    return out.transpose(1, 2)


def _readable(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
