"""GPTQ (Frantar et al., arXiv 2210.17323): rounds one input at a time, and lets the inputs that are not yet rounded
make up for the error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.grid import AFFINE, E2M1, E4M3, INTEGERS, TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, rounding
from qserve.quantize import fp8, rtn, trellis
from qserve.quantize.descent import descend
from qserve.quantize.fitted import MADE_UP, SHRINKAGE, SHRINKAGE_BY_CHANCE
from qserve.quantize.layer import LayerResult, output_error, quantized_weight
from qserve.quantize.sweep import sweep_with_torch

DAMPING_LADDER = (0.01, 0.1, 1.0)
# Up to this many inputs a Hessian is inverted in float64; leaves of its factorization.
_DOUBLE, _TILE = 8192, 256
# The descent that follows starts from codes for a shrunk Hessian: a part of that suffices, also of 2,048 tokens.
_DESCENT_SHRINKAGE = 0.25
_NOT_FINITE = "rounded to nearest: NaN or infinity in its calibration input"
_NOT_INVERTIBLE = "rounded to nearest: no damping made its Hessian invertible"


def quantize(weight: Tensor, stats: LayerStats, scheme: WeightScheme, *, act_order: bool = True) -> LayerResult:
    """Quantize ``weight`` float32 [out, in] with ``stats.hessian``. Groups of integers must divide ``in``.

    ``act_order`` rounds the inputs of greatest activation first. Groups remain the consecutive inputs of the
    checkpoint and their scales are fixed beforehand, so nothing about the order needs to be stored. Without it
    a group's scales are chosen when its turn comes, on weights that already make up for earlier errors.
    Either way they minimize the error weighted by the Hessian's diagonal. Scales of floats, of two levels and
    with real zero points are always fixed beforehand, as several outputs or groups may share one.

    Correlations of inputs are lowered, the more the fewer tokens were seen, as for any covariance estimated from few
    samples (shrinkage towards the diagonal: Ledoit and Wolf, 2004; Schaefer and Strimmer, 2005). Without any
    correlation this would be rounding to nearest.

    Where ``stats`` have the drift of the input X from the float model's F, the layer aims at the float model's output
    W F instead of W X (asymmetric calibration, arXiv 2504.02692). The least-squares solution for that is
    W + W (F - X) X^T (X X^T)^-1. A layer that adds to the residual stream aims at the float model's stream behind it
    (as in arXiv 2509.06297), so it also makes up for what earlier layers have left there. The weight to round goes
    ``MADE_UP`` of the way: a regression also finds what is there by chance.

    Codes and scales then descend together (``descent``), to 0.89 of GPTQ's error on text that was not seen.

    It never fails for numeric reasons. Damping climbs ``DAMPING_LADDER``, then the diagonal is raised until the Hessian
    must be positive definite. If the Hessian is not finite, the weight is rounded to nearest. The result says so.
    """
    return quantize_with(inverse_of(stats, act_order=act_order), weight, stats, scheme)


@dataclass(frozen=True)
class Inverse:
    """The order in which inputs are rounded, and the factor of the Hessian's inverse in that order; or None and the
    reason where the Hessian is of no use. It takes much of the time, and serves every weight and scheme of an input."""

    order: Tensor
    act_order: bool
    factor: Factor | None
    reason: str = ""


def inverse_of(stats: LayerStats, *, act_order: bool = True) -> Inverse:
    """The inverse of ``stats.hessian``. Raises ``ValueError`` where there is none."""
    hessian = stats.hessian
    if hessian is None:
        raise ValueError("GPTQ needs statistics with a Hessian")
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(hessian))
    if not stats.finite() or not bool(torch.isfinite(hessian).all()):
        return Inverse(order, act_order, None, _NOT_FINITE)
    factor = inverse_factor(hessian, order, shrinkage(stats))
    return Inverse(order, act_order, factor, "" if factor else _NOT_INVERTIBLE)


def shrinkage(stats: LayerStats) -> float:
    """How much the Hessian's diagonal is raised, relative to itself: correlations fall to 1 / (1 + this)."""
    return SHRINKAGE.value + SHRINKAGE_BY_CHANCE.value * len(stats.absmax) / max(1, stats.tokens)


def quantize_with(
    inverse: Inverse, weight: Tensor, stats: LayerStats, scheme: WeightScheme, *, descends: bool = True
) -> LayerResult:
    """``quantize`` with the inverse of ``stats``, already computed. ``descends``: else codes and scales stay as GPTQ
    leaves them, which takes a quarter of the time and is enough to compare schemes."""
    factor = inverse.factor
    if factor is None:
        return _to_nearest(weight, stats, scheme, inverse.reason)
    weight = following(inverse, weight, stats)
    if scheme.grid is TRELLIS:
        return measured(weight, on_trellis(inverse, factor, weight, stats, scheme), factor, stats)
    found = rounded(inverse, factor.upper, weight, stats.diagonal, scheme)
    if descends and scheme.grid is not E4M3:
        found = improved(inverse, weight, found, stats, scheme)
    return finished(weight, found, factor, stats, scheme)


def on_trellis(
    inverse: Inverse, factor: Factor, weight: Tensor, stats: LayerStats, scheme: WeightScheme
) -> QuantizedWeight:
    """``weight`` in trellis codes. A code cannot descend by itself, for it shares bits with others; scales can."""
    assert stats.hessian is not None
    scales = trellis.group_scales(weight, stats.diagonal, scheme)
    packed = trellis.sweep(weight, factor.upper, inverse.order, scales, scheme)
    _, scales = descend(
        weight, packed.unpack(), scales, None, scheme, stats.hessian, descent_diagonal(stats), inverse.order, count=0
    )
    return QuantizedWeight(scheme, packed, scales)


Rounded = tuple[Tensor, Tensor, Tensor | None]
"""Codes uint8 [out, in], scales and zeros float32 [out, groups]; no zeros where the scheme has one zero point."""


def improved(
    inverse: Inverse, weight: Tensor, found: Rounded, stats: LayerStats, scheme: WeightScheme,
    *, count: int | None = None, coupled: Tensor | None = None,
) -> Rounded:  # fmt: skip
    """``found`` for ``weight`` after the descent of codes and scales; ``count`` and ``coupled`` as ``descend`` has
    them."""
    codes, scales, zeros = found
    assert stats.hessian is not None
    raised, whole = rtn.above_minima(weight, scales, zeros, scheme)
    codes, scales = descend(
        raised, codes, scales, whole, scheme, stats.hessian, descent_diagonal(stats), inverse.order,
        fit_scales=not (scheme.scale_bits or scheme.grid.real_zeros),  # those depend on each other, or on minima
        count=count, coupled=coupled,
    )  # fmt: skip
    return codes, scales, zeros


def descent_diagonal(stats: LayerStats) -> Tensor:
    """What counts as the Hessian's diagonal in the descent."""
    return stats.diagonal * (1 + _DESCENT_SHRINKAGE * shrinkage(stats))


def finished(
    weight: Tensor, found: Rounded, factor: Factor, stats: LayerStats, scheme: WeightScheme
) -> LayerResult:
    """The result for ``weight``, which already makes up for earlier losses."""
    return measured(weight, quantized_weight(*found, scheme), factor, stats)


def measured(weight: Tensor, packed: QuantizedWeight, factor: Factor, stats: LayerStats) -> LayerResult:
    """``packed`` as the result for ``weight``."""
    error, energy = output_error(weight, packed.dequantize().sub_(weight), stats)
    return LayerResult(packed, error, energy, factor.damping, int((stats.diagonal == 0).sum()), factor.note)


def rounded(inverse: Inverse, upper: Tensor, weight: Tensor, diagonal: Tensor, scheme: WeightScheme) -> Rounded:
    """``weight`` after GPTQ's own pass. ``upper``: of the inverse's factor; ``diagonal``: of the Hessian."""
    if scheme.grid not in (INTEGERS, AFFINE, E2M1, E4M3):
        raise ValueError(f"GPTQ rounds to integers, e2m1 or e4m3 numbers, not to {scheme}")
    if scheme.grid is E4M3:
        scales = fp8.search(weight, diagonal, scheme)
        return sweep_with_torch(weight, diagonal, scheme, inverse.order, upper, scales)
    if not (inverse.act_order or scheme.scale_bits or scheme.grid.scale_bits == 8 or scheme.grid.real_zeros):
        return sweep_with_torch(weight, diagonal, scheme, inverse.order, upper)
    scales, zeros = rtn.group_scales(weight, diagonal, scheme)
    raised, whole = rtn.above_minima(weight, scales, zeros, scheme)
    if native.serves(weight):
        codes = rounding.sweep(raised.contiguous(), upper, inverse.order, scales, whole, scheme)
    else:
        codes, _, _ = sweep_with_torch(raised, diagonal, scheme, inverse.order, upper, scales, whole)
    return codes, scales, zeros


def following(inverse: Inverse, weight: Tensor, stats: LayerStats) -> Tensor:
    """``weight`` float32 [out, in], unrounded, changed to make up for earlier losses where ``stats`` have the drift."""
    order, factor = inverse.order, inverse.factor
    drifted = None if factor is None else _drifted(weight, stats)
    if factor is None or drifted is None or not bool(torch.isfinite(drifted).all()):
        return weight
    change = drifted[:, order] @ factor.upper.t() @ factor.upper
    return weight.index_add(1, order, change, alpha=MADE_UP.value)


def _drifted(weight: Tensor, stats: LayerStats) -> Tensor | None:
    """2/rows of what is missing to the layer's output, times its input: float32 [out, in]; W (F - X)^T X where it does
    not add to the residual stream. None where ``stats`` do not have it."""
    if stats.target is not None and stats.hessian is not None:
        return torch.addmm(stats.target, weight, stats.hessian, alpha=-1.0)
    return None if stats.drift is None else weight @ stats.drift


def _to_nearest(weight: Tensor, stats: LayerStats, scheme: WeightScheme, reason: str) -> LayerResult:
    return replace(rtn.quantize(weight, stats, scheme), fallback=reason)


@dataclass(frozen=True)
class Factor:
    """``upper`` float32 [in, in] with upper^T upper = (H + shrinkage * diag H + damping * mean(diag H) I)^-1."""

    upper: Tensor
    damping: float
    note: str = ""


def inverse_factor(hessian: Tensor, order: Tensor, shrinkage: float = 0.0) -> Factor | None:
    """The Cholesky factor of the damped inverse of ``hessian[order, order]``, or None where no rung of the ladder
    gives one. In float64; in float32 for inputs so wide that float64 would take too much memory.

    Dead inputs (a zero on the diagonal) get the mean diagonal, so they are rounded without touching others.
    """
    original = hessian.diagonal()[order].double()
    dead = original == 0
    mean = float(original[~dead].mean()) if not bool(dead.all()) else 1.0
    original[dead] = mean
    original *= 1 + shrinkage
    for damping in DAMPING_LADDER:
        if (upper := _invert(hessian, order, original + damping * mean)) is not None:
            note = "" if damping == DAMPING_LADDER[0] else f"damping raised to {damping:g}"
            return Factor(upper, damping, note)
    # A diagonal above the sum of its row makes any symmetric matrix positive definite (Gershgorin).
    sums = torch.stack([row.abs().sum(dtype=torch.float64) for row in hessian])[order]
    diagonal = torch.maximum(original, sums) + DAMPING_LADDER[0] * abs(mean)
    if (upper := _invert(hessian, order, diagonal)) is not None:
        return Factor(upper, DAMPING_LADDER[-1], "diagonal raised above the sum of each row")
    return None


def _invert(hessian: Tensor, order: Tensor, diagonal: Tensor) -> Tensor | None:
    """Upper U with U^T U = M^-1, M being ``hessian`` in ``order`` with another ``diagonal``.

    With M = R R^T and R upper triangular, U is R^-1. R is the ordinary Cholesky factor of M with both axes reversed. So
    one factorization and one triangular inverse suffice, both in place.
    """
    backward = order.flip(0)
    dtype = torch.float64 if len(order) <= _DOUBLE else torch.float32
    matrix = torch.empty(len(order), len(order), dtype=dtype)
    for start in range(0, len(order), _TILE):
        rows = backward[start : start + _TILE]
        matrix[start : start + _TILE] = hessian[rows][:, backward]
    matrix.diagonal().copy_(diagonal.flip(0))
    if not _cholesky(matrix):
        return None
    _invert_lower(matrix)
    upper = matrix.to(torch.float32)
    del matrix
    upper = upper.flip(0, 1).triu_()
    return upper if bool(torch.isfinite(upper.diagonal()).all()) and bool((upper.diagonal() > 0).all()) else None


def _cholesky(matrix: Tensor) -> bool:
    """The lower triangle of ``matrix`` becomes its Cholesky factor; False where it is not positive definite. It works
    by halves, so that all but the leaves are matrix products. The upper triangle is left as it was."""
    size = len(matrix)
    if size <= _TILE or matrix.device.type != "cpu":  # a GPU's library does so itself
        lower, info = torch.linalg.cholesky_ex(matrix)
        matrix.copy_(lower)
        return int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all())
    half = size // 2
    top, side, rest = matrix[:half, :half], matrix[half:, :half], matrix[half:, half:]
    if not _cholesky(top):
        return False
    side.copy_(torch.linalg.solve_triangular(top.t(), side, upper=True, left=False))
    rest.addmm_(side, side.t(), alpha=-1.0)
    return _cholesky(rest)


def _invert_lower(matrix: Tensor) -> None:
    """The lower triangle of ``matrix`` becomes its inverse."""
    size = len(matrix)
    if size <= _TILE or matrix.device.type != "cpu":
        identity = torch.eye(size, dtype=matrix.dtype)
        matrix.copy_(torch.linalg.solve_triangular(matrix, identity, upper=False))
        return
    half = size // 2
    top, side, rest = matrix[:half, :half], matrix[half:, :half], matrix[half:, half:]
    _invert_lower(top)
    _invert_lower(rest)
    side.copy_(-(rest.tril() @ side @ top.tril()))
