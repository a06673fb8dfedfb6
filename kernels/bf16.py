"""What calibration computes in bfloat16 with sums in float32, beside the products of linears: second moments, attention.

Knows how work is packed and shared among threads; does not know what the results are for. See ``csrc/qserve.h``.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from qserve.kernels import abi, native
from qserve.kernels.threads import default_threads

_PANEL = 64
# Rows that are packed together: large enough that threads seldom meet, small enough for the last-level cache.
_ROWS = 2048


@cache
def has_bf16() -> bool:
    """Whether this machine has the kernel: AVX512-BF16, and the C kernels were built."""
    return native.missing() is None and bool(native.library().qs_has_bf16())


def add_moment(
    out: Tensor, right: Tensor, left: Tensor | None = None, *, keep: float, gain: float, threads: int | None = None
) -> None:
    """``out = keep * out + gain * left^T right``, in place; ``left`` None is ``right``, and then only what lies on or
    above the diagonal of ``out`` is right afterwards.

    out float32 [left's width, right's width], contiguous; left and right [rows, width], rounded to bfloat16. The result
    does not depend on the number of threads.
    """
    rows, width = right.shape
    height = width if left is None else left.shape[1]
    if out.shape != (height, width) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"moments of {height} by {width} columns do not go into {out.dtype} {tuple(out.shape)}")
    if left is not None and len(left) != rows:
        raise ValueError(f"{len(left)} rows have no product with {rows}")
    across, down = -(-width // _PANEL), -(-height // _PANEL)
    tiles = across * (across + 1) // 2 if left is None else across * down
    pairs = (min(rows, _ROWS) + 1) // 2
    packed = torch.empty(across + (0 if left is None else down), pairs, _PANEL, 2, dtype=torch.bfloat16)
    threads = min(threads or default_threads(), tiles)
    library = native.library()
    for start in range(0, rows, _ROWS):
        parts = [each[start : start + _ROWS].to(torch.bfloat16).contiguous() for each in (right, left) if each is not None]
        count = len(parts[0])
        addresses = [packed.data_ptr(), packed.data_ptr() + 4 * across * _PANEL * ((count + 1) // 2)]
        described = abi.Moment(
            left=addresses[left is not None], right=addresses[0], out=out.data_ptr(), height=height, width=width,
            pairs=(count + 1) // 2, upper=int(left is None), keep=keep if start == 0 else 1.0, gain=gain,
        )  # fmt: skip
        for part, address in zip(parts, addresses, strict=False):
            _share(
                -(-part.shape[1] // _PANEL), threads,
                lambda first, size, part=part, address=address: library.qs_pack_pairs(
                    part.data_ptr(), len(part), part.shape[1], first, size, address
                ),
            )  # fmt: skip
        _share(tiles, threads, lambda first, size, op=described: library.qs_add_moment(C.byref(op), first, size))


def attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, threads: int | None = None
) -> Tensor:
    """Causal attention of each sequence, bfloat16 [batch, heads, tokens, head_dim] (a view of [batch, tokens, ...]).

    queries [batch, heads, tokens, head_dim]; keys and values [batch, kv_heads, tokens, head_dim], head_dim even; they
    are rounded to bfloat16. The result does not depend on the number of threads.
    """
    batch, heads, tokens, head_dim = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape != (batch, kv_heads, tokens, head_dim) or values.shape != keys.shape or heads % kv_heads or head_dim % 2:
        raise ValueError(f"no attention of {list(queries.shape)} to {list(keys.shape)} and {list(values.shape)}")
    given = [each.to(torch.bfloat16).contiguous() for each in (queries, keys, values)]
    out = torch.empty(batch, tokens, heads, head_dim, dtype=torch.bfloat16)
    op = abi.Causal(*(each.data_ptr() for each in (*given, out)), heads, kv_heads, tokens, head_dim, scale)
    items, library = batch * kv_heads, native.library()
    statuses = _share(
        items, min(threads or default_threads(), items), lambda first, size: library.qs_attend_causal(C.byref(op), first, size)
    )
    if any(statuses):
        raise MemoryError("no memory for attention")
    return out.transpose(1, 2)


def _share(count: int, threads: int, work: Callable[[int, int], int | None]) -> list[int | None]:
    """``work(first, how many)`` by each thread, the caller being one, of its part of ``count`` pieces."""
    bounds = [count * thread // threads for thread in range(threads + 1)]
    parts = [(first, stop - first) for first, stop in pairwise(bounds)]
    others = [_helpers(threads).submit(work, *part) for part in parts[1:]]  # ctypes lets go of the interpreter's lock
    return [work(*parts[0]), *(other.result() for other in others)]


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """They sleep when there is nothing to do."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="bf16")
