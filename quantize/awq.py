"""AWQ (Lin et al., arXiv 2306.00978): scales up the weights of the most important inputs before rounding.

The paper's clipping is not needed: the search of ``scales`` already chooses scales below or beyond min-max, by the
error weighted with each input's importance. That search cannot see how the errors of different groups add up in the
output, so ``quantize`` then fits the scales of an output's groups together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize import refit, rtn
from qserve.quantize.channel_scale import evenly, normalized, shared
from qserve.quantize.layer import LayerResult

# Rows that the error is measured on. They tell candidates apart whose errors differ by far less than a scale gains.
_ROWS = 256
# A scale must remove this share of the error: less may be chance, and folding is not free (it rounds norms).
_GAIN = 0.01
_MIDDLE = 0.5
_INPUT_POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
_WEIGHT_POWERS = (0.0, 0.25, 0.75, 1.0)


def quantize(weight: Tensor, stats: LayerStats, scheme: WeightScheme) -> LayerResult:
    """Round ``weight`` float32 [out, in] to nearest, then fit its scales to the output where there is a Hessian.

    ``weight`` and ``stats`` are already scaled: columns multiplied, ``stats.divided(scale)``.
    """
    return refit.fit(weight, rtn.quantize(weight, stats, scheme), stats)


def search(
    weights: Sequence[Tensor],
    stats: LayerStats,
    schemes: Sequence[WeightScheme],
    channels: Tensor | None = None,
    *,
    importance: Tensor | None = None,
) -> Tensor | None:
    """The scale of least output error, float32 [in], positive, geometric mean 1: the input is divided by it and the
    columns of every weight are multiplied by it. None where no scale is clearly better than none.

    weights     float32 [out, in] each, with their ``schemes``
    channels    int64 [in], the channel of the layer before that each input comes from. Inputs that share one (the
                heads of a group in grouped-query attention) get the same scale. None where each has its own
    importance  float32 [in], the cost of a squared error in each input's weights, in place of the Hessian; for a
                method that makes up for part of the error afterwards

    A scale is mean|x|**a / rms(w)**b. The paper takes b = 1 - a or 0; searching a, then b, then a again is never
    worse. The error is that of weights rounded with searched scales. With min-max scales, as in the paper, the best a
    is about twice as large; with searched scales, that a may be worse than no scaling.
    """
    if not stats.finite():
        return None
    inputs = shared(stats.absmean, channels, "mean")
    squares = torch.stack([weight.square().sum(0) for weight in weights]).sum(0)
    columns = shared(squares / sum(map(len, weights)), channels, "mean").sqrt()
    measure = _Error(weights, stats, schemes, importance)

    def scale(a: float, b: float) -> Tensor:
        return normalized(inputs.pow(a) / columns.pow(b))

    tried: dict[tuple[float, float], float] = {}

    def best(candidates: Iterable[tuple[float, float]]) -> tuple[float, float]:
        for candidate in candidates:
            if candidate not in tried:
                tried[candidate] = measure(scale(*candidate))
        return min(tried, key=lambda candidate: tried[candidate])

    a, _ = best((power, _MIDDLE) for power in _INPUT_POWERS)
    a, b = best((a, power) for power in _WEIGHT_POWERS)
    a, b = best((near, b) for near in (a - 0.05, a + 0.05) if near > 0)
    without = measure(torch.ones_like(inputs))
    return scale(a, b) if tried[a, b] < (1 - _GAIN) * without else None


class _Error:
    """The squared error of the outputs with a candidate scale, on some rows of every weight."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        stats: LayerStats,
        schemes: Sequence[WeightScheme],
        importance: Tensor | None,
    ) -> None:
        total = sum(len(weight) for weight in weights)
        self.parts = [
            (evenly(weight, -(-_ROWS * len(weight) // total)), scheme)
            for weight, scheme in zip(weights, schemes, strict=True)
        ]
        self.importance = stats.diagonal if importance is None else importance
        self.hessian = stats.hessian if importance is None else None
        self.sample = stats.sample if importance is None and self.hessian is None else None

    def __call__(self, scale: Tensor) -> float:
        error = 0.0
        for weight, scheme in self.parts:
            rounded = rtn.nearest(weight * scale, self.importance / scale.square(), scheme)
            change = rounded.dequantize().div_(scale).sub_(weight)
            if self.hessian is not None:
                error += float(((change @ self.hessian) * change).sum())
            elif self.sample is not None and len(self.sample):
                error += float((change @ self.sample.t()).square().sum())
            else:
                error += float((change.square() @ self.importance).sum())
        return error
