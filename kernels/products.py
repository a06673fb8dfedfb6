"""The products of calibration: linears, second moments and causal attention, with sums in float32.

They run in the precision in which this processor multiplies fastest, packed and shared among threads, see
``csrc/qserve.h``. On a GPU, and without the C library, torch computes everything.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qserve.kernels import abi, native
from qserve.kernels.executor import CPU

# As in ``qserve.h``: columns of a panel, and rows of a chunk.
_PANELS = {torch.float32: 48, torch.bfloat16: 64}
_CHUNK = 96
# Bytes of a column to pack at a time: enough that threads seldom meet, few enough for the last-level cache.
_COLUMN = 4096
# With fewer rows, packing a weight costs more than the faster product gains.
_WORTH_PACKING = 64


def multiplied(device: torch.device = CPU) -> torch.dtype:
    """The dtype that ``device`` multiplies: bfloat16 where that is faster than float32 (AVX512-BF16, GPUs from Ampere
    on), else float32."""
    if device.type == "cpu":
        fast = native.missing() is None and native.library().qs_multiplies_bf16(native.ISAS.index(native.best_isa()))
    else:
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if fast else torch.float32


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, threads: int | None = None) -> Tensor:
    """``inputs`` float32 [..., in] by ``weight`` float32 [out, in]: float32 [..., out]. A row's result depends neither
    on other rows nor on the number of threads."""
    outputs, width = weight.shape
    rows = inputs.reshape(-1, width)
    if len(rows) < _WORTH_PACKING or not native.serves(rows):
        return functional.linear(inputs, weight, bias)
    rows, packed = _readable(rows, torch.float32), _panels(outputs, width, torch.float32)
    _pack(weight.contiguous().t(), packed, None, threads, turned=True)
    out = torch.empty(*inputs.shape[:-1], outputs)
    op = abi.Product(
        rows.data_ptr(), packed.data_ptr(), native.address(bias), out.data_ptr(), rows.stride(0), len(rows), width,
        outputs,
    )  # fmt: skip
    native.run_pieces(native.library().qs_multiply, op, -(-len(rows) // _CHUNK), threads)
    return out


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
    """``out = keep * out + gain * left^T right``, in place. If ``left`` is None, it is ``right``, and afterwards only
    the diagonal of ``out`` and what lies above it are valid.

    out float32 [left's width, right's width], contiguous; left and right [rows, width], rounded to ``multiplied()``.
    ``magnitudes`` float32 [width] each: the largest magnitude of each column of ``right`` so far, and the sum of
    magnitudes; both are updated. The result does not depend on the number of threads.
    """
    rows, width = right.shape
    height = width if left is None else left.shape[1]
    if out.shape != (height, width) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"moments of {height} by {width} columns do not go into {out.dtype} {tuple(out.shape)}")
    if left is not None and len(left) != rows:
        raise ValueError(f"{len(left)} rows have no product with {rows}")
    if not native.serves(out):
        _add_with_torch(out, right, right if left is None else left, keep, gain, magnitudes)
        return
    dtype = multiplied()
    at_once = _COLUMN // dtype.itemsize
    packed = [_panels(width, min(rows, at_once), dtype)]
    packed += [] if left is None else [_panels(height, min(rows, at_once), dtype)]
    across, down = len(packed[0]), len(packed[-1])
    tiles = across * (across + 1) // 2 if left is None else across * down
    for start in range(0, rows, at_once):
        stop = min(start + at_once, rows)
        _pack(right[start:stop], packed[0], magnitudes, threads)
        if left is not None:
            _pack(left[start:stop], packed[1], None, threads)
        op = abi.Moment(
            left=packed[-1].data_ptr(), right=packed[0].data_ptr(), out=out.data_ptr(), height=height, width=width,
            count=stop - start, dtype=abi.DTYPES[dtype], upper=int(left is None), keep=keep if start == 0 else 1.0,
            gain=gain,
        )  # fmt: skip
        native.run_pieces(native.library().qs_add_moment, op, tiles, threads)


def attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, threads: int | None = None
) -> Tensor:
    """Causal attention of each sequence, ``multiplied()`` [batch, heads, tokens, head_dim] (a view of [batch, tokens,
    ...]).

    queries [batch, heads, tokens, head_dim]; keys and values [batch, kv_heads, tokens, head_dim], head_dim even; they
    are rounded to ``multiplied()``. The result does not depend on the number of threads.
    """
    batch, heads, tokens, dim = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape != (batch, kv_heads, tokens, dim) or values.shape != keys.shape or heads % kv_heads or dim % 2:
        raise ValueError(f"no attention of {list(queries.shape)} to {list(keys.shape)} and {list(values.shape)}")
    if not native.serves(queries):
        q, k, v = (each.float() for each in (queries, keys, values))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    dtype = multiplied()
    given = [_readable(each, dtype) for each in (queries, keys, values)]
    out = torch.empty(batch, tokens, heads, dim, dtype=dtype)
    described = [abi.Heads(each.data_ptr(), *each.stride()[:3], abi.DTYPES[each.dtype]) for each in given]
    op = abi.Causal(*described, out.data_ptr(), heads, kv_heads, tokens, dim, abi.DTYPES[dtype], scale)
    native.run_pieces(native.library().qs_attend_causal, op, batch * kv_heads, threads)
    return out.transpose(1, 2)


def _add_with_torch(
    out: Tensor, right: Tensor, left: Tensor, keep: float, gain: float, magnitudes: tuple[Tensor, Tensor] | None
) -> None:
    dtype = multiplied(out.device)
    rows, columns = right.to(dtype), left.to(dtype).t()
    if dtype == torch.float32:
        out.addmm_(columns, rows, beta=keep, alpha=gain)
    else:
        torch.addmm(out, columns, rows, out_dtype=torch.float32, beta=keep, alpha=gain, out=out)
    if magnitudes is not None:
        most, total = magnitudes
        right = right.float()
        torch.maximum(most, right.abs().amax(dim=0), out=most)
        total.add_(right.abs().sum(dim=0))


def _panels(width: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Room for so many rows of a matrix with ``width`` columns; bfloat16 in pairs of rows."""
    panel = _PANELS[dtype]
    return torch.empty(-(-width // panel), rows + rows % 2, panel, dtype=dtype)


def _pack(
    rows: Tensor, packed: Tensor, magnitudes: tuple[Tensor, Tensor] | None, threads: int | None, *, turned: bool = False
) -> None:
    """``rows`` [count, width] in panels. ``turned``: ``rows`` is float32 and the transpose of the matrix."""
    along = 0 if turned else 1
    rows = rows if turned else _readable(rows, packed.dtype)
    most, total = magnitudes or (None, None)
    op = abi.Pack(
        rows=rows.data_ptr(), packed=packed.data_ptr(), absmax=native.address(most), abssum=native.address(total),
        stride=rows.stride(1 - along), count=len(rows), width=rows.shape[1], dtype=abi.DTYPES[rows.dtype],
        to=abi.DTYPES[packed.dtype], turned=int(turned),
    )  # fmt: skip
    native.run_pieces(native.library().qs_pack_panels, op, len(packed), threads)


def _readable(tensor: Tensor, multiplied: torch.dtype) -> Tensor:
    if tensor.dtype not in (torch.float32, multiplied):
        tensor = tensor.to(torch.float32)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
