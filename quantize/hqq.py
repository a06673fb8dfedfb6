"""HQQ (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023): finds zero points that
give few weights a large error and most a small one, without calibration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels.threads import torch_threads
from qserve.quantize import scales as scale_search
from qserve.quantize.layer import LayerResult, output_error, quantized_weight
from qserve.quantize.passes import elements

P = 0.7
"""The power of the norm: below 1, so that one large error counts less than several small ones of the same sum."""
# beta at first, its growth with each step, and the number of steps (see ``search``); then some steps with whole zero
# points.
_BETA, _GROWTH, _STEPS = 10.0, 1.01, 20
_WHOLE_STEPS = 3
_TINY = 1e-9
# Weights per pass: its few buffers then stay in the second-level cache.
_CHUNK = 1 << 16


def quantize(weight: Tensor, stats: LayerStats | None, scheme: WeightScheme) -> LayerResult:
    """Round ``weight`` float32 [out, in] to integers with a zero point for each group, which must divide ``in``.

    ``stats`` only measure the error of the result. Raises ``ValueError`` for schemes without
    zero points.
    """
    if scheme.grid is not INTEGERS or scheme.symmetric or scheme.rows != 1:
        raise ValueError(f"HQQ needs integers with a zero point for each group, not {scheme}")
    out, inp = weight.shape
    groups = weight.reshape(-1, scheme.group_width(inp))
    scales, zeros, codes = torch.empty(len(groups)), torch.empty(len(groups)), torch.empty_like(groups)
    with torch_threads(1):  # the operations are too small for two threads
        for part in torch.arange(len(groups)).split(max(1, elements(groups, _CHUNK) // groups.shape[1])):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            scales[rows], zeros[rows] = search(groups[rows], scheme)
            codes[rows] = scale_search.encode(groups[rows], scales[rows, None], zeros[rows, None], scheme.max_code)
    packed = quantized_weight(codes.view(out, inp), scales.view(out, -1), zeros.view(out, -1), scheme)
    error, energy = output_error(weight, packed.dequantize().sub_(weight), stats)
    return LayerResult(packed, error, energy)


def search(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Scales and whole zero points float32 [groups] for ``weight`` float32 [groups, width]: those of the least sum of
    |w - dequantized w| ** P that half-quadratic splitting finds, or min-max where it finds no less.

    In units of the scale, with codes q = round(w / s + z), the error is w / s - (q - z). Splitting adds a variable e,
    which the norm counts, and ties it to the error by beta / 2 * (e - error) ** 2. Each step sets e to the minimum of
    that sum (see ``shrink``), z to the mean of q - (w / s - e), and s by least squares; then beta grows. The paper
    keeps the scale and stores fractional zero points. The formats here hold whole ones, and the scale must make up for
    that: the last steps are with z rounded.
    """
    start_scales, start_zeros = scale_search.minmax(weight, scheme)
    assert start_zeros is not None
    scales, zeros, beta = start_scales, start_zeros, _BETA
    for step in range(_STEPS + _WHOLE_STEPS):
        if step == _STEPS:
            zeros = zeros.round().clamp(0, scheme.max_code)
        steps = weight / scales[:, None]
        codes = _codes(steps, zeros, scheme)
        wanted = steps - shrink(steps - (codes - zeros[:, None]), beta)
        if step < _STEPS:
            zeros = (codes - wanted).mean(dim=1)
        centred = codes - zeros[:, None]
        square = centred.square().sum(dim=1).clamp(min=_TINY)
        scales = scales * ((wanted * centred).sum(dim=1) / square).clamp(0.5, 2.0)
        beta *= _GROWTH
    scales = scale_search.storable(scales)
    better = _sum(weight, scales, zeros, scheme) < _sum(weight, start_scales, start_zeros, scheme)
    return torch.where(better, scales, start_scales), torch.where(better, zeros, start_zeros)


def _sum(weight: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """The sum to minimize, float32 [groups]."""
    rounded = (_codes(weight / scales[:, None], zeros, scheme) - zeros[:, None]) * scales[:, None]
    return (weight - rounded).abs().pow(P).sum(dim=1)


def shrink(errors: Tensor, beta: float) -> Tensor:
    """The proximal operator of |e| ** P / beta, to first order: errors lose |error| ** (P - 1) / beta of their
    magnitude, and smaller ones become zero."""
    magnitude = errors.abs()
    return errors.sign() * (magnitude - magnitude.pow(P - 1) / beta).clamp(min=0)


def _codes(steps: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    return (steps + zeros[:, None]).round_().clamp_(0, scheme.max_code)
