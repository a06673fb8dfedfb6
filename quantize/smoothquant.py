"""SmoothQuant (Xiao et al., arXiv 2211.10438): moves part of the inputs' outliers into the weights before both are
rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.reference import round_input
from qserve.quantize import rtn
from qserve.quantize.channel_scale import evenly, normalized, shared
from qserve.quantize.layer import static_scales

_ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ROWS = 512
# A scale must remove this share of the error: less may be chance, and folding is not free (it rounds norms).
_GAIN = 0.02


def search(
    weights: Sequence[Tensor],
    stats: LayerStats,
    scheme: WeightScheme,
    activations: ActivationScheme,
    channels: Tensor | None = None,
) -> Tensor | None:
    """A scale float32 [in], positive, geometric mean 1: the input is divided by it and the columns of every weight are
    multiplied by it. None where no scale clearly improves the products of rounded inputs and weights.

    A scale is max|x|**alpha / max|w|**(1 - alpha); alpha is the one of least error between the float product of
    ``stats.sample`` and that of rounded inputs with rounded weights. ``weights`` float32 [out, in] each;
    ``channels`` as in ``awq.search``. Raises ``ValueError`` where no rows were sampled.
    """
    if not len(stats.sample):
        raise ValueError("SmoothQuant needs statistics with sampled rows")
    if not stats.finite():
        return None
    inputs = shared(stats.absmax, channels, "amax")
    columns = shared(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0), channels, "amax")
    measure = _Error(weights, stats, scheme, activations)
    without = measure(torch.ones_like(inputs))
    candidates = [normalized(inputs.pow(alpha) / columns.pow(1 - alpha)) for alpha in _ALPHAS]
    error, best = min((measure(scale), index) for index, scale in enumerate(candidates))
    return candidates[best] if error < (1 - _GAIN) * without else None


class _Error:
    """The squared error of the products with a candidate scale, for some rows of every weight."""

    def __init__(
        self, weights: Sequence[Tensor], stats: LayerStats, scheme: WeightScheme, activations: ActivationScheme
    ) -> None:
        total = sum(len(weight) for weight in weights)
        # Outputs that share a scale stay together.
        self.weights = list(weights) if scheme.rows != 1 else [
            evenly(weight, -(-_ROWS * len(weight) // total)) for weight in weights
        ]
        self.stats, self.scheme, self.activations = stats, scheme, activations
        self.exact = [stats.sample @ weight.t() for weight in self.weights]

    def __call__(self, scale: Tensor) -> float:
        fixed = None
        if not self.activations.dynamic:
            fixed = float(static_scales((self.stats.absmax / scale).max(), self.activations.grid))
        inputs = round_input(self.stats.sample / scale, self.activations, fixed)
        importance = self.stats.diagonal / scale.square()
        error = 0.0
        for weight, exact in zip(self.weights, self.exact, strict=True):
            rounded = rtn.nearest(weight * scale, importance, self.scheme).dequantize()
            error += float((inputs @ rounded.t()).sub_(exact).square().sum())
        return error
