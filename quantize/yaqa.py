"""YAQA (Tseng et al., arXiv 2505.22988): GPTQ with a second Hessian, that of the whole model's divergence by the
outputs of the layer. GPTQ makes up for errors among the inputs of an output; here outputs make up for each other's as
well, in the directions in which the model does not tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.grid import E4M3, TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.trellis import RING, PackedTrellis
from qserve.quantize import descent, gptq
from qserve.quantize.layer import LayerResult, quantized_weight

# Windows of the calibration text that give the gradients.
SAMPLES = 32
# Outputs that are rounded at once: they do not make up for each other until the next turn.
ROWS = 32
# Turns of all outputs after the first, each with the errors of all others known.
TURNS = 1
# Correlations of outputs fall to 1 / (1 + this, times outputs per token), for they are estimated from few tokens.
_SHRINKAGE = 0.5


def couples(outputs: int, inputs: int) -> bool:
    """Whether the outputs of a linear of this size make up for each other. Where they are more than the inputs they
    gain little, and their Hessian is the largest of all."""
    return outputs <= inputs


def quantize(
    weight: Tensor, stats: LayerStats, scheme: WeightScheme, outputs: Sequence[LayerStats], *, act_order: bool = True
) -> LayerResult:
    """Quantize ``weight`` float32 [out, in], which joins the linears of one input.

    stats    of the input, with its Hessian H
    outputs  of the gradients by the outputs of each linear, in order, with their Hessians G; where they are missing or
             tell nothing, this is GPTQ

    It lowers tr(G E H E^T), E being what the weight loses. Outputs of the greatest gradients come first, ``ROWS`` at a
    time, and those still to come aim at what makes up best for the errors so far. Then all have ``TURNS`` more. GPTQ
    and its descent round the rows; order, drift and damping are as there. Trellis codes have one turn, ring by ring.
    """
    inverse = gptq.inverse_of(stats, act_order=act_order)
    in_rings = scheme.grid is TRELLIS
    curvature = None if scheme.grid is E4M3 else Curvature.of(outputs, in_order=in_rings)
    if inverse.factor is None or curvature is None:
        return gptq.quantize_with(inverse, weight, stats, scheme)
    weight = gptq.following(inverse, weight, stats)
    if in_rings:
        return gptq.measured(weight, _ring_by_ring(inverse, curvature, weight, stats, scheme), inverse.factor, stats)
    assert stats.hessian is not None
    coupled = descent.couplings(stats.hessian, gptq.descent_diagonal(stats), inverse.order)
    aims = weight[curvature.order]
    ahead, lost = aims.clone(), torch.empty_like(aims)
    parts = [slice(start, start + ROWS) for start in range(0, len(aims), ROWS)]
    found: list[gptq.Rounded] = []
    for part in parts:
        each = gptq.rounded(inverse, inverse.factor.upper, ahead[part], stats.diagonal, scheme)
        found.append(gptq.improved(inverse, ahead[part], each, stats, scheme, coupled=coupled))
        values = quantized_weight(*found[-1], scheme).dequantize()
        lost[part] = aims[part] - values
        curvature.make_up(ahead, part, values)
    for _ in range(TURNS):
        for number, part in enumerate(parts):
            aim = aims[part] + curvature.pull(lost, part)
            found[number] = gptq.improved(inverse, aim, found[number], stats, scheme, count=1, coupled=coupled)
            lost[part] = aims[part] - quantized_weight(*found[number], scheme).dequantize()
    back = curvature.order.argsort()
    codes = torch.cat([codes for codes, _, _ in found])[back]
    scales = torch.cat([scales for _, scales, _ in found])[back]
    zeros = [zeros for _, _, zeros in found if zeros is not None]
    joined = codes, scales, torch.cat(zeros)[back] if zeros else None
    return gptq.finished(weight, joined, inverse.factor, stats, scheme)


def _ring_by_ring(
    inverse: gptq.Inverse, curvature: Curvature, weight: Tensor, stats: LayerStats, scheme: WeightScheme
) -> QuantizedWeight:
    """``weight`` in trellis codes: the outputs of a ring are rounded at once, and stay."""
    assert inverse.factor is not None
    ahead, streams, scales = weight.clone(), [], []
    for start in range(0, len(weight), RING):
        part = slice(start, min(start + RING, len(weight)))
        found = gptq.on_trellis(inverse, inverse.factor, ahead[part], stats, scheme)
        curvature.make_up(ahead, part, found.dequantize())
        assert isinstance(found.stored, PackedTrellis)
        streams.append(found.stored.streams)
        scales.append(found.scales)
    return QuantizedWeight(scheme, PackedTrellis(torch.cat(streams), scheme.bits, len(weight)), torch.cat(scales))


@dataclass(frozen=True)
class Curvature:
    """G of the outputs of one weight, which is block diagonal where it joins linears.

    order    int64 [out]: outputs of the greatest gradients first, unless they stay in order
    hessian  float32 [out, out], in that order, with shrunk correlations and damped
    upper    float32 [out, out]: upper^T upper = hessian^-1
    """

    order: Tensor
    hessian: Tensor
    upper: Tensor

    @classmethod
    def of(cls, outputs: Sequence[LayerStats], *, in_order: bool = False) -> Curvature | None:
        """None where there are no gradients, or not finite ones."""
        blocks = []
        for stats in outputs:
            assert stats.hessian is not None
            mean = stats.diagonal.mean()
            if not stats.finite() or not mean > 0:
                return None
            block = stats.hessian / mean  # how linears compare does not matter: they are not coupled
            block.diagonal().masked_fill_(block.diagonal() == 0, 1.0)
            blocks.append(block)
        if not blocks:
            return None
        hessian = torch.block_diag(*blocks)
        order = hessian.diagonal().argsort(descending=True, stable=True)
        order = torch.arange(len(hessian)) if in_order else order
        shrinkage = _SHRINKAGE * len(hessian) / sum(stats.tokens for stats in outputs)
        factor = gptq.inverse_factor(hessian, order, shrinkage)
        if factor is None:
            return None
        hessian = hessian[order][:, order]
        raised = hessian.diagonal() * (1 + shrinkage)
        hessian.diagonal().copy_(raised + factor.damping)
        return cls(order, hessian, factor.upper)

    def make_up(self, ahead: Tensor, part: slice, values: Tensor) -> None:
        """Now that the outputs ``part`` have ``values``, move those behind them in ``ahead`` [out, in] to where they
        make up best for what ``part`` loses."""
        own, behind = self.upper[part, part], self.upper[part, part.stop :]
        reach = torch.linalg.solve_triangular(own, behind, upper=True)
        ahead[part.stop :].addmm_(reach.t(), ahead[part] - values, alpha=-1.0)

    def pull(self, lost: Tensor, part: slice) -> Tensor:
        """What the outputs ``part`` should lose less, float32 [rows, in], to make up for what all others lose."""
        rows = self.hessian[part]
        others = rows @ lost - rows[:, part] @ lost[part]
        found: Tensor = torch.linalg.solve(rows[:, part], others)
        return found
