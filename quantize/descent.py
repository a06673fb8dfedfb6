"""Coordinate descent on the error of a layer's output, from codes and scales that are good already: every code in turn
takes its best value while all others stay, then every scale (Behdin et al., arXiv 2309.01885; Nair and Suggala,
2406.17542).

GPTQ never returns to an input that it has rounded, and fixes scales before it knows the codes. This does both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.grid import E2M1
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, rounding
from qserve.quantize import fp4
from qserve.quantize.passes import elements
from qserve.quantize.scales import storable
from qserve.quantize.sweep import sweep_with_torch
from qserve.runtime import heap

# Turns of codes and scales: the first gains most, and a fourth takes less than one percent of the error. A turn costs
# as much as all of GPTQ's rounding, so the widest inputs have one.
_TURNS, _WIDE_TURNS, _WIDE = 3, 1, 8192
# Columns of a Hessian that are copied or multiplied at once, and weights that descend at once, some 30 bytes each.
_TILE, _WEIGHTS = 512, 1 << 21


def turns(inputs: int) -> int:
    """How often codes and scales of a linear with so many inputs have their turn."""
    return _TURNS if inputs <= _WIDE else _WIDE_TURNS


def descend(
    weight: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: WeightScheme,
    hessian: Tensor,
    diagonal: Tensor,
    order: Tensor,
    *,
    fit_scales: bool = True,
    count: int | None = None,
    coupled: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Better ``codes`` uint8 [out, in] and ``scales`` float32 [out, groups] for ``weight`` float32 [out, in].

    zeros       float32 [out, groups], which stay, or None where the scheme's own zero point holds
    hessian     float32 [in, in], symmetric; its diagonal counts as ``diagonal`` float32 [in], none negative
    order       int64 [in]: which input has its turn when
    fit_scales  else scales stay
    count       turns of each; ``turns`` says how many where it is None
    coupled     ``couplings`` of the last three, where they are known already

    The error of an output is d H d^T, d being what its weights lose. No step raises it, but for the rounding of scales
    to what is stored. An output depends only on its own row.
    """
    coupled = couplings(hessian, diagonal, order) if coupled is None else coupled
    count = turns(weight.shape[1]) if count is None else count
    found, fitted = torch.empty(codes.shape, dtype=torch.uint8), scales.clone(memory_format=torch.contiguous_format)
    for start in range(0, len(weight), rows := max(32, elements(weight, _WEIGHTS) // weight.shape[1])):
        part = slice(start, start + rows)
        own = None if zeros is None else zeros[part].contiguous()
        problem = _Problem(weight[part].contiguous(), own, scheme, hessian, diagonal, order, coupled)
        found[part], fitted[part] = problem.descend(codes[part], fitted[part], fit_scales, count)
    if len(weight) > rows:
        heap.release()  # the next layer's factorization needs it
    return found, fitted


def couplings(hessian: Tensor, diagonal: Tensor, order: Tensor) -> Tensor:
    """float32 [in, in], in the order and with the sign of ``sweep``: an error e of input i moves the best value of
    input j by e H_ij / H_jj. Inputs that were never seen move nothing."""
    reach = torch.where(diagonal > 0, -1.0 / diagonal, 0.0)[order]
    found = torch.empty_like(hessian)
    for start in range(0, len(order), _TILE):
        rows = order[start : start + _TILE]
        torch.mul(hessian[rows][:, order], reach, out=found[start : start + _TILE])
    return found.fill_diagonal_(1.0)


class _Problem:
    """Some outputs, and what stays while their codes and scales change."""

    def __init__(
        self,
        weight: Tensor,
        zeros: Tensor | None,
        scheme: WeightScheme,
        hessian: Tensor,
        diagonal: Tensor,
        order: Tensor,
        coupled: Tensor,
    ) -> None:
        self.weight, self.zeros, self.scheme = weight, zeros, scheme
        self.hessian, self.diagonal, self.order, self.couplings = hessian, diagonal, order, coupled
        self.raised = diagonal - hessian.diagonal()

    def descend(self, codes: Tensor, scales: Tensor, fit_scales: bool, count: int) -> tuple[Tensor, Tensor]:
        for _ in range(count):
            scales = self.best_scales(codes, scales) if fit_scales else scales
            codes = self.best_codes(codes, scales)
        return codes, self.best_scales(codes, scales) if fit_scales else scales

    def best_codes(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Each code in turn. The inputs before it have their new codes, those behind it their old ones: what is lost of
        those is added beforehand."""
        lost = (self.weight - self._steps(codes).mul_(self._spread(scales)))[:, self.order]
        start = self.weight[:, self.order]
        for first in range(0, lost.shape[1], _TILE):
            columns = self.couplings[first:, first : first + _TILE].tril(-1)
            start[:, first : first + _TILE].addmm_(lost[:, first:], columns, alpha=-1.0)
        lost[:, self.order] = start  # back in the order of the checkpoint
        if native.serves(lost):
            return rounding.sweep(
                lost, self.couplings, self.order, scales, self.zeros, self.scheme, aims=self.weight
            )
        found, _, _ = sweep_with_torch(
            lost, self.diagonal, self.scheme, self.order, self.couplings, scales, self.zeros, self.weight
        )
        return found.contiguous()

    def best_scales(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Each scale of an output in turn: with c the steps of a group, it changes by r c / c H c^T, where r is that
        group of what is lost times H."""
        steps, scales = self._steps(codes), scales.clone()
        shared = fp4.global_scale(scales, self.scheme)
        lost = self.weight - steps * self._spread(scales)
        slopes = (lost @ self.hessian).addcmul_(lost, self.raised)
        del lost
        width = self.scheme.group_width(steps.shape[1])
        for group in range(scales.shape[1]):
            start, stop = group * width, (group + 1) * width
            part, rows = steps[:, start:stop], self.hessian[start:stop]
            curved = (part @ rows[:, start:stop]).addcmul_(part, self.raised[start:stop])
            curvature, slope = (curved * part).sum(1), (slopes[:, start:stop] * part).sum(1)
            # A weight that is not finite tells nothing of its output's scales.
            change = torch.where(curvature > 0, slope / curvature, 0.0).nan_to_num_(0.0, 0.0, 0.0)
            before = scales[:, group].clone()
            wanted = before + change
            scales[:, group] = fp4.storable(wanted, shared) if self.scheme.grid is E2M1 else storable(wanted)
            change = scales[:, group] - before
            slopes[:, stop:].addmm_(part * change[:, None], rows[:, stop:], alpha=-1.0)
        return scales

    def _steps(self, codes: Tensor) -> Tensor:
        """float32 [out, in]: codes counted from their zero points."""
        if self.scheme.grid is E2M1:
            return E2M1.numbers(codes)
        zeros = float(self.scheme.zero) if self.zeros is None else self._spread(self.zeros)
        return codes.to(torch.float32).sub_(zeros)

    def _spread(self, grouped: Tensor) -> Tensor:
        return grouped.repeat_interleave(self.scheme.group_width(self.weight.shape[1]), 1)
