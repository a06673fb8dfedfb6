"""Round to nearest: every weight by itself, with searched scales."""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.grid import AFFINE, E2M1, E4M3, INTEGERS, TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import fp4, fp8, superblocks, trellis
from qserve.quantize import scales as scale_search
from qserve.quantize.layer import LayerResult, output_error, quantized_weight


def quantize(weight: Tensor, stats: LayerStats | None, scheme: WeightScheme) -> LayerResult:
    """Round ``weight`` float32 [out, in] to ``scheme``.

    With ``stats`` the scales minimize the error weighted by the Hessian's diagonal, without the plain error. Groups of
    integers must divide ``in``.
    """
    usable = stats is not None and stats.finite()
    importance = stats.diagonal if stats is not None and usable else torch.ones(weight.shape[1])
    packed = nearest(weight, importance, scheme)
    error, energy = output_error(weight, packed.dequantize().sub_(weight), stats)
    dead = int((importance == 0).sum()) if usable else 0
    return LayerResult(packed, error, energy, dead_inputs=dead)


def nearest(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """``weight`` float32 [out, in] with the scales of least squared error, each input's weighted by ``importance``
    float32 [in], and the nearest codes. Raises ``ValueError`` for other grids, and for integers
    that share a scale among outputs."""
    if scheme.grid is E4M3:
        return fp8.nearest(weight, importance, scheme)
    if scheme.grid is E2M1:
        return fp4.nearest(weight, importance, scheme)
    if scheme.grid is TRELLIS:
        return trellis.nearest(weight, importance, scheme)
    if scheme.grid not in (INTEGERS, AFFINE) or scheme.rows != 1:
        raise ValueError(f"rounding needs e4m3 or e2m1 numbers, or integers with scales for each output, not {scheme}")
    out, inp = weight.shape
    width = scheme.group_width(inp)
    scales, zeros = group_scales(weight, importance, scheme)
    raised, whole = above_minima(weight, scales, zeros, scheme)
    offset: Tensor | float = float(scheme.zero) if whole is None else whole[..., None]
    codes = scale_search.encode(raised.reshape(out, -1, width), scales[..., None], offset, scheme.max_code)
    return quantized_weight(codes.reshape(out, inp), scales, zeros, scheme)


def group_scales(weight: Tensor, importance: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """The scales and zero points float32 [out, groups] of least squared error that ``scheme`` can store; arguments as
    those of ``nearest``."""
    if scheme.grid is E2M1:
        return fp4.search(weight, importance, scheme), None
    if scheme.scale_bits or scheme.grid.real_zeros:
        return superblocks.search(weight, importance, scheme)
    return scale_search.search_groups(weight, importance, scheme)


def above_minima(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: WeightScheme
) -> tuple[Tensor, Tensor | None]:
    """A weight and whole zero points that have the codes of ``weight`` with real ``zeros``: those become 0, and each
    group is raised by its minimum, which changes no error of rounding. Both unchanged where zero points are whole."""
    if zeros is None or not scheme.grid.real_zeros:
        return weight, zeros
    raised = weight + (scales * zeros).repeat_interleave(scheme.group_width(weight.shape[1]), 1)
    return raised, torch.zeros_like(zeros)
