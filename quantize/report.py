"""The progress that the pipeline reports, and the report that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qserve.checkpoint.spec import QuantSpec

if TYPE_CHECKING:  # these load torch, and the command line imports this module at once
    from qserve.checkpoint.card import QualityCard
    from qserve.checkpoint.loaders import LoaderVerdict
    from qserve.quantize.forecast import Forecast
    from qserve.quantize.layer import LayerReport
    from qserve.quantize.mixed.allocate import Tried


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` steps of ``phase``; ``remaining`` seconds, if known; a line to show, or ""."""

    phase: Literal[
        "prepare", "generate", "sensitivity", "gradients", "quantize", "distill", "imatrix", "write", "measure"
    ]
    done: int
    total: int
    remaining: float | None = None
    message: str = ""


Progress = Callable[[ProgressEvent], None]


@dataclass(frozen=True)
class QuantizeReport:
    """What was done: one ``LayerReport`` per quantized linear, in the order they ran.

    notices          what differs from what was asked, what mixed precision chose, what tuning gained, one line each
    tried            sizes and divergences that mixed precision compared
    verdicts         which loaders accept the checkpoint, and why others do not
    forecast         made before the start; ``checkpoint_bytes`` is the real size of the weight files
    bits_per_weight  of the linears inside the blocks, scales included; floats count 16
    """

    spec: QuantSpec
    format: str
    layers: tuple[LayerReport, ...]
    notices: tuple[str, ...]
    verdicts: tuple[LoaderVerdict, ...]
    forecast: Forecast
    bits_per_weight: float
    checkpoint_bytes: int
    seconds: float
    peak_bytes: int
    calibration_sha256: str | None
    card: QualityCard | None
    tried: tuple[Tried, ...] = ()
