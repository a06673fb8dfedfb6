"""``Rounder``: rounds a linear to every scheme it may get, to nearest or with error compensation, and tells the error
of its output before a scheme is chosen. ``compensate`` lets the linears behind it make up for that error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.calibration.visit import Gather, Inputs, Replacement, Visit
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels.threads import torch_threads
from qserve.quantize import gptq, rtn
from qserve.quantize.layer import output_error

# Rows of a weight on which its schemes are compared.
_ROWS = 48


class Rounder(Protocol):
    """Rounds linears that share an input."""

    def round(self, weight: Tensor, scheme: WeightScheme) -> Tensor:
        """``weight`` float32 [out, in] as ``scheme`` will leave it."""

    def error(self, rows: Tensor, scheme: WeightScheme) -> float:
        """The squared error of the output of ``rows``, float32 [n, in], some rows of a weight."""


class Nearest:
    """Rounds each weight by itself, to nearest. ``inputs`` float32 [..., in]."""

    def __init__(self, inputs: Tensor) -> None:
        inputs = inputs.reshape(-1, inputs.shape[-1])
        self._inputs = inputs
        self._stats = LayerStats(inputs.shape[-1], hessian=False)
        self._stats.update(inputs)

    def round(self, weight: Tensor, scheme: WeightScheme) -> Tensor:
        return rtn.quantize(weight, self._stats, scheme).weight.dequantize()

    def error(self, rows: Tensor, scheme: WeightScheme) -> float:
        return float((self._inputs @ (self.round(rows, scheme) - rows).t()).square().sum())


class Compensated:
    """GPTQ with the Hessian in ``stats``, which is factored once for all weights and schemes. The descent that follows
    lowers the errors of all schemes alike, so it is left out."""

    def __init__(self, stats: LayerStats, *, act_order: bool) -> None:
        self._stats = stats
        self._inverse = gptq.inverse_of(stats, act_order=act_order)

    def round(self, weight: Tensor, scheme: WeightScheme) -> Tensor:
        return gptq.quantize_with(self._inverse, weight, self._stats, scheme, descends=False).weight.dequantize()

    def error(self, rows: Tensor, scheme: WeightScheme) -> float:
        with torch_threads(1):  # the operations are too small for two threads
            change = self.round(rows, scheme).sub_(rows)
            error = float(output_error(rows, change, self._stats)[0].sum())
            if self._inverse.factor is None:  # nothing was cancelled out, and the statistics may be infinite
                return error
            # Errors that cancel by chance correlations do not cancel on other texts.
            return error + gptq.shrinkage(self._stats) * float((change.square() @ self._stats.diagonal).sum())


def compensate(visit: Visit) -> None:
    """Let the unrounded linears of ``visit`` make up for losses before them, as far as they can. Its block keeps their
    new weights. The walk must follow the float model."""
    if not visit.groups:
        return

    def on_inputs(inputs: Inputs) -> Replacement:
        if inputs.stats is None:
            return Replacement(inputs.weights)
        inverse = gptq.inverse_of(inputs.stats, act_order=False)
        return Replacement([gptq.following(inverse, weight, inputs.stats) for weight in inputs.weights])

    visit.replace(on_inputs, Gather(drift=True))


def errors(
    rounder: Rounder, weights: Sequence[Tensor], schemes: Sequence[WeightScheme | None]
) -> list[float]:
    """The squared error of all outputs of ``weights`` float32 [out, in] together under each scheme, from evenly spaced
    rows; 0 for None, which keeps 16-bit floats."""
    total = sum(len(weight) for weight in weights)
    share = min(1.0, _ROWS / total)
    rows = torch.cat([_spaced(weight, math.ceil(share * len(weight))) for weight in weights])
    return [0.0 if scheme is None else total / len(rows) * rounder.error(rows, scheme) for scheme in schemes]


def _spaced(weight: Tensor, count: int) -> Tensor:
    return weight[torch.arange(count) * len(weight) // count]
