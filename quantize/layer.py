"""``LayerResult``: one weight after quantization, and the line about it in the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.grid import E2M1, E4M3, Grid
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import products
from qserve.quantize import fp4

# Columns of a Hessian that are converted at once: all of 28,672 inputs would take gigabytes.
_TILE = 4096


@dataclass(frozen=True)
class LayerReport:
    """What happened to one linear.

    error        mean squared error of the layer's output on its calibration inputs, relative to the output's
                 mean square (of the weights themselves where there were no inputs)
    damping      what was added to the Hessian's diagonal, relative to its mean; None where GPTQ did not run
    dead_inputs  inputs that were zero throughout calibration
    fallback     why the layer was not quantized as asked, or ""
    """

    module: str
    scheme: WeightScheme
    error: float
    damping: float | None = None
    dead_inputs: int = 0
    fallback: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> LayerReport:
        return cls(**{**content, "scheme": WeightScheme(**content["scheme"])})


@dataclass(frozen=True)
class LayerResult:
    """A packed weight with the squared error and the energy of each output (float64 [out] each)."""

    weight: QuantizedWeight
    error: Tensor
    energy: Tensor
    damping: float | None = None
    dead_inputs: int = 0
    fallback: str = ""

    def rows(self, start: int, stop: int) -> LayerResult:
        """The outputs ``start`` to ``stop`` alone: linears that share an input are quantized as one."""
        zeros, bias = self.weight.zeros, self.weight.bias
        part = replace(
            self.weight,
            stored=self.weight.codes[start:stop],
            scales=self.weight.scales[start:stop],
            zeros=None if zeros is None else zeros[start:stop],
            bias=None if bias is None else bias[start:stop],
        )
        return replace(self, weight=part, error=self.error[start:stop], energy=self.energy[start:stop])

    def report(self, module: str) -> LayerReport:
        error = float(self.error.sum() / self.energy.sum().clamp(min=torch.finfo(torch.float64).tiny))
        return LayerReport(module, self.weight.scheme, error, self.damping, self.dead_inputs, self.fallback)


def quantized_weight(codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: WeightScheme) -> QuantizedWeight:
    """float codes [out, in], scales and zeros [out, groups] -> QuantizedWeight with consecutive groups."""
    real = scheme.grid.real_zeros
    shared = fp4.global_scale(scales, scheme)
    if shared is not None:  # scales of parts that were rounded apart may be finer
        scales = fp4.storable(scales, shared)
    return QuantizedWeight(
        scheme=scheme,
        stored=codes.to(torch.uint8).contiguous(),
        scales=scales.contiguous(),
        zeros=None if zeros is None else zeros.to(torch.float32 if real else torch.uint8).contiguous(),
        global_scale=shared,
    )


def output_error(weight: Tensor, change: Tensor, stats: LayerStats | None) -> tuple[Tensor, Tensor]:
    """(squared error, energy), float64 [out]: d H d^T and w H w^T of each row. H is the identity where there are no
    finite statistics, and diagonal where only the diagonal was gathered."""
    if stats is None or not stats.finite():
        return change.square().sum(dim=1).double(), weight.square().sum(dim=1).double()
    hessian = stats.hessian
    if hessian is None:
        return (change.square() @ stats.diagonal).double(), (weight.square() @ stats.diagonal).double()
    # The energy need not be as precise as the error, in which much cancels out.
    dtype = products.multiplied()
    rounded, energy = weight.to(dtype), torch.zeros(len(weight))
    for tile, part in zip(hessian.split(_TILE, dim=1), weight.split(_TILE, dim=1), strict=True):
        energy += (rounded @ tile.to(dtype)).to(torch.float32).mul_(part).sum(dim=1)
    return ((change @ hessian).mul_(change)).sum(dim=1).double(), energy.double()


def with_activations(
    quantized: LayerResult,
    activations: ActivationScheme | None,
    stats: LayerStats | None,
    input_scale: float | None = None,
) -> LayerResult:
    """``quantized`` for an input that is rounded by ``activations``; its error stays that of the weight alone.

    ``input_scale`` is the static scale of an input without ``stats``. Raises ``ValueError`` for a static scale with
    neither, or where the statistics are not finite.
    """
    scale = None
    if activations is not None and not activations.dynamic:
        if stats is None and input_scale is not None:
            scale = input_scale
        elif stats is None or not stats.finite():
            raise ValueError("a static activation scale needs finite statistics of the input")
        else:
            scale = float(static_scales(stats.absmax.max(), activations.grid))
    return replace(quantized, weight=replace(quantized.weight, activations=activations, input_scale=scale))


def static_scales(absmax: Tensor, grid: Grid) -> Tensor:
    """float32, shaped as ``absmax``, positive: the scale that maps ``absmax`` to the largest number of ``grid``. An
    ``absmax`` of 0 counts as 1. Of e2m1 it is that of NVFP4: the least power of two with which the scale of a group
    that has ``absmax`` is an e4m3 number."""
    if grid is E2M1:
        most = torch.where(absmax > 0, absmax.float(), 1.0) / (E2M1.largest * E4M3.largest)
        return torch.exp2(most.log2().ceil()).clamp(min=2.0**-126)
    return (torch.where(absmax > 0, absmax.float(), 1.0) / grid.largest).clamp(min=torch.finfo(torch.float32).tiny)
