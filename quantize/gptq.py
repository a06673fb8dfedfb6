"""GPTQ (Frantar et al., arXiv 2210.17323): round one input at a time, and let the inputs not yet rounded make
up for the error.

Knows one weight and the Hessian of its input; does not know the layers around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import rtn
from qserve.quantize import scales as scale_search
from qserve.quantize.layer import Quantized, output_error, pack_codes

DAMPING_LADDER = (0.01, 0.1, 1.0)
# Columns rounded one by one before their error is applied to others by a matrix product.
_LEAF = 8
_NOT_FINITE = "rounded to nearest: NaN or infinity in its calibration input"
_NOT_INVERTIBLE = "rounded to nearest: no damping made its Hessian invertible"


def quantize(weight: Tensor, stats: LayerStats, scheme: WeightScheme, *, act_order: bool = True) -> Quantized:
    """Quantize ``weight`` float32 [out, in], whose group size must divide ``in``, with ``stats.hessian``.

    ``act_order`` rounds the inputs of greatest activation first. Groups remain the consecutive inputs of the
    checkpoint and their scales are fixed beforehand, so nothing about the order needs to be stored. Without it
    a group's scales are chosen when its turn comes, on weights that already make up for earlier errors.
    Either way they minimize the error weighted by the Hessian's diagonal.

    Never fails for numeric reasons: damping climbs ``DAMPING_LADDER``, then the diagonal is raised until the
    Hessian must be positive definite; where it is not finite the weight is rounded to nearest. The result says so.
    """
    hessian = stats.hessian
    if hessian is None:
        raise ValueError("GPTQ needs statistics with a Hessian")
    if not stats.finite() or not bool(torch.isfinite(hessian).all()):
        return rtn.quantize(weight, stats, scheme, fallback=_NOT_FINITE)
    diagonal = hessian.diagonal().clone()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(weight.shape[1])
    factor = inverse_factor(hessian[order][:, order])
    if factor is None:
        return rtn.quantize(weight, stats, scheme, fallback=_NOT_INVERTIBLE)
    sweep = _Sweep(weight, diagonal, scheme, order.tolist(), factor.upper, fixed_scales=act_order)
    sweep.run(0, weight.shape[1])
    codes = torch.empty_like(sweep.codes)
    codes[order] = sweep.codes
    packed = pack_codes(codes.t(), sweep.scales.t(), None if sweep.zeros is None else sweep.zeros.t(), scheme)
    error, energy = output_error(weight, packed.dequantize().sub_(weight), stats)
    return Quantized(packed, error, energy, factor.damping, int((diagonal == 0).sum()), factor.note)


@dataclass(frozen=True)
class Factor:
    """``upper`` float32 [in, in] with upper^T upper = (H + damping * mean(diag H) I)^-1."""

    upper: Tensor
    damping: float
    note: str = ""


def inverse_factor(hessian: Tensor) -> Factor | None:
    """The Cholesky factor of the damped inverse in float64, or None where no rung of the ladder gives one.

    Dead inputs (a zero on the diagonal) get the mean diagonal, so they are rounded without touching others.
    """
    matrix = hessian.to(torch.float64)
    diagonal = matrix.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    diagonal[dead] = mean
    original = diagonal.clone()
    for damping in DAMPING_LADDER:
        diagonal.copy_(original + damping * mean)
        if (upper := _invert(matrix)) is not None:
            note = "" if damping == DAMPING_LADDER[0] else f"damping raised to {damping:g}"
            return Factor(upper, damping, note)
    # A diagonal above the sum of its row makes any symmetric matrix positive definite (Gershgorin).
    diagonal.copy_(torch.maximum(original, matrix.abs().sum(dim=1)) + DAMPING_LADDER[0] * abs(mean))
    if (upper := _invert(matrix)) is not None:
        return Factor(upper, DAMPING_LADDER[-1], "diagonal raised above the sum of each row")
    return None


def _invert(matrix: Tensor) -> Tensor | None:
    """Upper U with U^T U = matrix^-1: with M M^T = matrix and M upper triangular, U is M^-1. M is the ordinary
    Cholesky factor of the matrix with both axes reversed, so one factorization and one solve suffice."""
    lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(info) != 0:
        return None
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).to(torch.float32).contiguous()
    return upper if bool(torch.isfinite(upper).all()) and bool((upper.diagonal() > 0).all()) else None


class _Sweep:
    """The state of one pass over the inputs. Everything is transposed, [in, out], so that an input is a row."""

    def __init__(
        self,
        weight: Tensor,
        diagonal: Tensor,
        scheme: WeightScheme,
        order: list[int],
        upper: Tensor,
        *,
        fixed_scales: bool,
    ) -> None:
        out, inp = weight.shape
        self.scheme, self.upper = scheme, upper
        self.width = scheme.group_width(inp)
        self.group = [column // self.width for column in order]
        self.left = weight.t()[order].contiguous()  # what remains to be rounded, errors made up for
        self.error = torch.empty_like(self.left)
        self.codes = torch.empty(inp, out, dtype=torch.uint8)
        self.scales = torch.empty(inp // self.width, out)
        self.zeros = None if scheme.symmetric else torch.empty(inp // self.width, out)
        self.importance = diagonal
        self.fixed_scales = fixed_scales
        self.inverse = (1.0 / upper.diagonal()).tolist()
        if fixed_scales:
            for group in range(inp // self.width):
                self._choose_scales(group, weight[:, group * self.width : (group + 1) * self.width])

    def _choose_scales(self, group: int, weight: Tensor) -> None:
        importance = self.importance[group * self.width : (group + 1) * self.width]
        scales, zeros = scale_search.search(weight.contiguous(), importance, self.scheme)
        self.scales[group] = scales
        if self.zeros is not None and zeros is not None:
            self.zeros[group] = zeros

    def run(self, start: int, stop: int) -> None:
        """Round rows start..stop, which already make up for every earlier row: the first half, then what its
        error means for the second half in one product, then the second half."""
        size = stop - start
        # Halves are whole groups as long as possible, so that a group's scales see every earlier error.
        unit = self.width if size > self.width else _LEAF
        if not self.fixed_scales and size == self.width:
            self._choose_scales(start // self.width, self.left[start : start + self.width].t())
        if size <= unit:
            self._leaf(start, stop)
            return
        middle = start + max(1, size // 2 // unit) * unit
        self.run(start, middle)
        self.left[middle:stop].addmm_(
            self.upper[start:middle, middle:stop].t(), self.error[start:middle], alpha=-1.0
        )
        self.run(middle, stop)

    def _leaf(self, start: int, stop: int) -> None:
        zero, max_code = float(self.scheme.zero), self.scheme.max_code
        for row in range(start, stop):
            left, group = self.left[row], self.group[row]
            scales = self.scales[group]
            offset = zero if self.zeros is None else self.zeros[group]
            codes = torch.div(left, scales).round_().add_(offset).clamp_(0, max_code)
            self.codes[row] = codes
            error = torch.sub(left, codes.sub_(offset).mul_(scales), out=self.error[row]).mul_(self.inverse[row])
            if row + 1 < stop:
                self.left[row + 1 : stop].addr_(self.upper[row, row + 1 : stop], error, alpha=-1.0)
