"""``METHODS``: the ways to choose the codes of a weight, one row each.

A method is a file beside this one and a row here; job, forecast, pipeline and command line read the row. No row loads
torch before it runs: the command line asks for names and help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from qserve.quantize.fitted import SCALE_SEARCH
from qserve.quantize.gguf_recipes import RECIPES

if TYPE_CHECKING:
    from torch import Tensor

    from qserve.calibration.stats import LayerStats
    from qserve.checkpoint.spec import ActivationScheme, WeightScheme
    from qserve.quantize.layer import LayerResult

# Rows of a layer's input that are sampled for methods that round inputs.
_SAMPLE_ROWS = 512


class Quantize(Protocol):
    """Rounds ``weight`` float32 [out, in], which joins the linears of one input, to ``scheme``. ``stats`` are those of
    the input, None where there are none, and ``outputs`` those of the gradients by the outputs of each linear, empty
    where they are not known; ``act_order`` is the job's."""

    def __call__(
        self,
        weight: Tensor,
        stats: LayerStats | None,
        scheme: WeightScheme,
        *,
        act_order: bool,
        outputs: Sequence[LayerStats],
    ) -> LayerResult: ...


class SearchScale(Protocol):
    """A scale float32 [in] to divide an input by, and to multiply the columns of its ``weights`` (float32 [out, in]
    each) by; None where no scale is better. ``channels`` int64 [in] is the channel of the layer before that each input
    comes from."""

    def __call__(
        self,
        weights: Sequence[Tensor],
        stats: LayerStats,
        schemes: Sequence[WeightScheme],
        activations: ActivationScheme | None,
        channels: Tensor,
    ) -> Tensor | None: ...


@dataclass(frozen=True)
class Method:
    """One row.

    name          what ``--method`` calls it, and what the checkpoint records
    help          what it does, for the command line
    quantize      how a weight is rounded
    usual_for     the schemes of a job that use it where no method is named
    inputs        the linears it is for: those whose inputs stay floats, those whose inputs are rounded, or any
    instead       the advice in a refusal for other inputs
    text          whether it needs calibration text, uses it where there is some, or has no use for it
    symmetric     whether it can leave out zero points
    hessian       gathers the Hessian of each input
    sample_rows   gathers so many rows of each input
    outputs       gathers the gradients by the outputs of each linear: the whole model is in memory before the walk
    compensates   later weights make up for the error of earlier ones: the float model can be followed, and the rounding
                  learned after it
    search_scale  finds a scale that is folded into the layer before, or None
    cost          multiplications that take as long as rounding one weight
    """

    name: str
    help: str
    quantize: Quantize
    usual_for: tuple[str, ...] = ()
    inputs: Literal["any", "float", "rounded"] = "any"
    instead: str = ""
    text: Literal["needed", "used", "unused"] = "needed"
    symmetric: bool = True
    hessian: bool = False
    sample_rows: int = 0
    outputs: bool = False
    compensates: bool = False
    search_scale: SearchScale | None = None
    cost: float = SCALE_SEARCH.value


def _rtn(weight: Tensor, stats: LayerStats | None, scheme: WeightScheme, **_: object) -> LayerResult:
    from qserve.quantize import rtn

    return rtn.quantize(weight, stats, scheme)


def _gptq(
    weight: Tensor, stats: LayerStats | None, scheme: WeightScheme, *, act_order: bool, **_: object
) -> LayerResult:
    from qserve.quantize import gptq

    assert stats is not None  # a job without text is refused
    return gptq.quantize(weight, stats, scheme, act_order=act_order)


def _hqq(weight: Tensor, stats: LayerStats | None, scheme: WeightScheme, **_: object) -> LayerResult:
    from qserve.quantize import hqq

    return hqq.quantize(weight, stats, scheme)


def _awq(weight: Tensor, stats: LayerStats | None, scheme: WeightScheme, **_: object) -> LayerResult:
    from qserve.quantize import awq

    assert stats is not None
    return awq.quantize(weight, stats, scheme)


def _yaqa(
    weight: Tensor,
    stats: LayerStats | None,
    scheme: WeightScheme,
    *,
    act_order: bool,
    outputs: Sequence[LayerStats],
) -> LayerResult:
    from qserve.quantize import yaqa

    assert stats is not None
    return yaqa.quantize(weight, stats, scheme, outputs, act_order=act_order)


def _awq_scale(
    weights: Sequence[Tensor],
    stats: LayerStats,
    schemes: Sequence[WeightScheme],
    activations: ActivationScheme | None,
    channels: Tensor,
) -> Tensor | None:
    from qserve.quantize import awq

    return awq.search(weights, stats, schemes, channels)


def _smoothquant_scale(
    weights: Sequence[Tensor],
    stats: LayerStats,
    schemes: Sequence[WeightScheme],
    activations: ActivationScheme | None,
    channels: Tensor,
) -> Tensor | None:
    from qserve.quantize import smoothquant

    assert activations is not None
    return smoothquant.search(weights, stats, schemes[0], activations, channels)


_WEIGHTS_ALONE = "awq is for weights alone: --scheme weights; for rounded inputs use smoothquant"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "rtn",
            help="each weight by itself",
            quantize=_rtn,
            usual_for=("fp8", "fp8-tensor", "fp8-static", "fp8-block", "mxfp8"),
            text="used",
        ),
        Method(
            "hqq",
            help="zero points of the least p-norm, without calibration (--asym)",
            quantize=_hqq,
            inputs="float",
            instead="hqq is for weights alone: --scheme weights",
            text="unused",
            symmetric=False,
            cost=8 * SCALE_SEARCH.value,
        ),
        Method(
            "gptq",
            help="later weights make up for the errors of earlier ones; then codes and scales improve in turn",
            quantize=_gptq,
            usual_for=("weights", "trellis", "nvfp4a16", "mxfp4a16", "w4afp8", *RECIPES),
            hessian=True,
            compensates=True,
        ),
        Method(
            "yaqa",
            help="gptq whose outputs also make up for each other, by gradients of the whole model",
            quantize=_yaqa,
            inputs="float",
            instead="yaqa is for weights alone: --scheme weights",
            hessian=True,
            outputs=True,
            compensates=True,
        ),
        Method(
            "awq",
            help="channels with large inputs are enlarged first",
            quantize=_awq,
            inputs="float",
            instead=_WEIGHTS_ALONE,
            hessian=True,
            search_scale=_awq_scale,
        ),
        Method(
            "awq+gptq",
            help="both",
            quantize=_gptq,
            inputs="float",
            instead=_WEIGHTS_ALONE,
            hessian=True,
            compensates=True,
            search_scale=_awq_scale,
        ),
        Method(
            "smoothquant",
            help="outliers move from inputs into weights",
            quantize=_rtn,
            usual_for=("w8a8",),
            inputs="rounded",
            instead="smoothquant is for rounded inputs: --scheme w8a8 or fp8; for weights alone use awq",
            sample_rows=_SAMPLE_ROWS,
            search_scale=_smoothquant_scale,
        ),
        Method(
            "smoothquant+gptq",
            help="both",
            quantize=_gptq,
            usual_for=("nvfp4",),
            inputs="rounded",
            instead="smoothquant+gptq is for rounded inputs: --scheme nvfp4 or w8a8; for weights alone use awq+gptq",
            hessian=True,
            sample_rows=_SAMPLE_ROWS,
            compensates=True,
            search_scale=_smoothquant_scale,
        ),
    )
}


def usual_method(scheme: str) -> Method:
    """The method of ``scheme`` where none is named."""
    return next(method for method in METHODS.values() if scheme in method.usual_for)
