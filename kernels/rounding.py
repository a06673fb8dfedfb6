"""Quantizers' inner loops in C: scales of least error, and GPTQ's pass over the inputs.

Weights are handed to ``csrc/qserve.h`` and shared among threads; scales and orders are chosen elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.checkpoint.grid import E2M1
from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.trellis import RING
from qserve.kernels import abi
from qserve.kernels.native import Isa, address, library, run_pieces
from qserve.kernels.threads import default_threads

_SWEEP_OUTPUTS = 32  # QS_SWEEP_OUTPUTS


def search_scales(
    weight: Tensor,
    importance: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    ranges: Sequence[float],
    *,
    zero: int,
    max_code: int,
    threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Replace ``scales`` float32 [rows] and ``zeros`` (of the same shape, or None where the code of 0 is always
    ``zero``) by better ones for ``weight`` float32 [rows, width]. ``importance`` is float32 [period, width]; row r uses
    row r % period. The search is that of ``qs_scale_search`` in ``csrc/qserve.h``."""
    rows, width = weight.shape
    candidates = torch.tensor(ranges, dtype=torch.float32)
    op = abi.ScaleSearch(
        weight=address(weight), importance=address(importance), ranges=address(candidates), scales=address(scales),
        zeros=address(zeros), width=width, period=len(importance), steps=len(candidates), zero=zero, max_code=max_code,
    )  # fmt: skip
    # Waking a thread takes about as long as searching this many weights.
    threads = threads or min(default_threads(), max(1, weight.numel() >> 15))
    run_pieces(library().qs_search_scales, op, rows, threads, isa)


def choose_scales(
    weight: Tensor,
    importance: Tensor,
    candidates: Tensor,
    *,
    threads: int | None = None,
    isa: Isa | None = None,
) -> Tensor:
    """For each row of ``weight`` float32 [rows, width] that of its ``candidates`` float32 [rows, steps] which leaves
    the least error in numbers of four bits (e2m1): float32 [rows]. ``importance`` as of ``search_scales``."""
    rows, width = weight.shape
    scales = torch.empty(rows)
    op = abi.ScaleChoice(
        weight=address(weight), importance=address(importance), candidates=address(candidates), scales=address(scales),
        width=width, period=len(importance), steps=candidates.shape[1],
    )  # fmt: skip
    threads = threads or min(default_threads(), max(1, weight.numel() >> 15))
    run_pieces(library().qs_choose_scales, op, rows, threads, isa)
    return scales


def sweep(
    weight: Tensor,
    upper: Tensor,
    order: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: WeightScheme,
    *,
    aims: Tensor | None = None,
    threads: int | None = None,
    isa: Isa | None = None,
) -> Tensor:
    """The codes uint8 [out, in] of ``weight`` float32 [out, in], chosen input by input; later inputs compensate for the
    error of earlier ones. They are integers, or numbers of four bits where the ``scheme`` says fp4.

    ``order`` int64 [in] says which input comes when. ``upper`` float32 [in, in], in that order, is the factor of the
    inverse Hessian. ``scales`` and ``zeros`` float32 [out, groups] belong to consecutive inputs; zeros is None where
    the code of 0 is always that of the scheme. ``aims``, like ``weight``: errors are counted from them, not from what
    is rounded. The computation is that of ``qs_sweep`` in ``csrc/qserve.h``. A row's result
    depends neither on other rows nor on ``threads``.
    """
    outputs, inputs = weight.shape
    if upper.shape != (inputs, inputs) or len(order) != inputs or inputs % scales.shape[1] or len(scales) != outputs:
        raise ValueError(f"no sweep of {list(weight.shape)} with {list(upper.shape)} and {list(scales.shape)}")
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    places = order.to(torch.int32)
    op = abi.Sweep(
        weight=address(weight), aims=address(aims), upper=address(upper), scales=address(scales), zeros=address(zeros),
        order=address(places), codes=address(codes), inputs=inputs, outputs=outputs, width=inputs // scales.shape[1],
        zero=scheme.zero, max_code=scheme.max_code, e2m1=scheme.grid is E2M1,
    )  # fmt: skip
    run_pieces(library().qs_sweep_chunks, op, -(-outputs // _SWEEP_OUTPUTS), threads, isa)
    return codes


def trellis_sweep(
    weight: Tensor,
    upper: Tensor | None,
    order: Tensor,
    scales: Tensor,
    bits: int,
    *,
    aims: Tensor | None = None,
    threads: int | None = None,
    isa: Isa | None = None,
) -> Tensor:
    """``sweep`` for trellis codes: their symbols uint8 [rings, in, 64]. Without ``upper`` no input makes up for
    another. The computation is that of ``qs_trellis_sweep`` in ``csrc/qserve.h``."""
    outputs, inputs = weight.shape
    if len(order) != inputs or inputs % scales.shape[1] or len(scales) != outputs:
        raise ValueError(f"no sweep of {list(weight.shape)} with {list(scales.shape)}")
    rings = -(-outputs // RING)
    symbols, places = torch.empty(rings, inputs, RING, dtype=torch.uint8), order.to(torch.int32)
    op = abi.TrellisSweep(
        weight=address(weight), aims=address(aims), upper=address(upper), scales=address(scales),
        order=address(places), symbols=address(symbols), inputs=inputs, outputs=outputs,
        width=inputs // scales.shape[1], bits=bits,
    )  # fmt: skip
    run_pieces(library().qs_trellis_panels, op, rings, threads, isa)
    return symbols
