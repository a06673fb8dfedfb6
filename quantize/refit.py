"""Scales fitted to given codes: for each output, all its groups together, for the least error of the output."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.quantize.layer import LayerResult, output_error
from qserve.quantize.scales import storable

# float64 numbers per system of equations that are alive at once.
_NUMBERS = 1 << 24
# Added to the diagonal, relative to its mean: groups whose codes are all zero have no scale of their own.
_DAMPING = 1e-4


def fit(weight: Tensor, quantized: LayerResult, stats: LayerStats) -> LayerResult:
    """``quantized`` with better scales, where ``stats`` has a finite Hessian. An output whose error would not fall
    keeps its scales.

    With c_g the codes of group g about their zero point (and zero elsewhere), the error of an output w is
    (w - sum_g s_g c_g) H (w - sum_g s_g c_g)^T: linear least squares in s, a system of [groups, groups] per output.
    """
    hessian = stats.hessian
    if hessian is None or not bool(torch.isfinite(hessian).all()):
        return quantized
    packed = quantized.weight
    out, inp = weight.shape
    groups = packed.scheme.groups(inp)
    ones = replace(packed, scales=torch.ones_like(packed.scales))
    fitted = packed.scales.clone()
    for start in range(0, out, rows := max(1, _NUMBERS // groups**2)):
        part = slice(start, start + rows)
        zeros = None if ones.zeros is None else ones.zeros[part]
        codes = replace(ones, stored=ones.codes[part], scales=ones.scales[part], zeros=zeros).dequantize()
        fitted[part] = _solve(weight[part], codes, hessian, groups, packed.scales[part])
    candidate = replace(packed, scales=storable(fitted))
    error, energy = output_error(weight, candidate.dequantize().sub_(weight), stats)
    better = (error < quantized.error)[:, None]
    scales = torch.where(better, candidate.scales, packed.scales)
    chosen = torch.where(better[:, 0], error, quantized.error)
    return replace(quantized, weight=replace(packed, scales=scales), error=chosen, energy=energy)


def _solve(weight: Tensor, codes: Tensor, hessian: Tensor, groups: int, start: Tensor) -> Tensor:
    """float32 [rows, groups]: the least-squares change of ``start``. Because the change is solved for, groups whose
    codes are all zero stay as they were, and damping draws towards ``start``."""
    rows, inp = weight.shape
    width = inp // groups
    by_group = codes.reshape(rows, groups, width)
    left = weight - (by_group * start[:, :, None]).reshape(rows, inp)
    right = ((left @ hessian) * codes).reshape(rows, groups, width).sum(2).double()
    system = torch.empty(rows, groups, groups, dtype=torch.float64)
    for group in range(groups):
        reach = by_group[:, group] @ hessian[group * width : (group + 1) * width]
        system[:, group] = (reach * codes).reshape(rows, groups, width).sum(2)
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += (_DAMPING * diagonal.mean(1, keepdim=True)).clamp(min=torch.finfo(torch.float64).tiny)
    change, info = torch.linalg.solve_ex(system, right)
    usable = (info == 0)[:, None] & torch.isfinite(change)
    return start + torch.where(usable, change, 0.0).to(torch.float32)
