"""What the pipeline is asked to do, what it tells on the way, and what it returns.

Knows options and their limits; does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.spec import QuantSpec, WeightScheme

if TYPE_CHECKING:  # these load torch, and the command line asks this module for its defaults
    from qserve.checkpoint.card import QualityCard
    from qserve.checkpoint.gptq_format import Version
    from qserve.checkpoint.loaders import LoaderVerdict
    from qserve.quantize.layer import LayerReport


@dataclass(frozen=True)
class QuantizeJob:
    """``calibration`` is a SOURCE of ``load_text`` or None (``rtn`` only: every input counts the same).

    loaders      must accept the checkpoint, or the job is refused before calibration
    overwrite    replace a checkpoint at OUT
    max_memory   bytes this process may use, or None for what is free
    Raises ``UsageError`` for values that contradict each other.
    """

    method: Literal["rtn", "gptq"] = "gptq"
    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    calibration: str | None = "builtin"
    samples: int = 128
    sequence_length: int = 512
    seed: int = 0
    act_order: bool = True
    loaders: tuple[str, ...] = ("qserve",)
    overwrite: bool = False
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("rtn", "gptq"):
            raise UsageError(f"method must be rtn or gptq, not {self.method!r}")
        if self.method == "gptq" and self.calibration is None:
            raise UsageError("gptq needs calibration text; give --calibration builtin or a file")
        for flag, value in (("--samples", self.samples), ("--sequence-length", self.sequence_length)):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1, not {value}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be 0 to 2**63 - 1, not {self.seed}")
        if self.max_memory is not None and self.max_memory < 1:
            raise UsageError(f"the memory limit must be positive, not {self.max_memory}")
        self.scheme  # noqa: B018  (checks bits and group size)

    @property
    def scheme(self) -> WeightScheme:
        return WeightScheme(self.bits, self.group_size, self.symmetric)

    @property
    def version(self) -> Version:
        """Of the GPTQ format: only the second stores a zero point of 0, which asymmetric weights may need."""
        return "gptq" if self.symmetric else "gptq_v2"

    @property
    def tokens(self) -> int:
        """Calibration tokens, 0 without calibration."""
        return self.samples * self.sequence_length if self.calibration is not None else 0


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` steps of ``phase``; ``remaining`` seconds as far as known; a line to show, or ""."""

    phase: Literal["prepare", "quantize", "write", "measure"]
    done: int
    total: int
    remaining: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Forecast:
    """Expected peak memory of the process (bytes), seconds until the checkpoint is written, its size (bytes)."""

    peak_bytes: int
    seconds: float
    checkpoint_bytes: int


@dataclass(frozen=True)
class QuantizeReport:
    """What was done: one ``LayerReport`` per quantized linear, in the order they ran.

    notices    what differs from what was asked, one line each
    verdicts   which loaders accept the checkpoint, and why others do not
    """

    spec: QuantSpec
    layers: tuple[LayerReport, ...]
    notices: tuple[str, ...]
    verdicts: tuple[LoaderVerdict, ...]
    forecast: Forecast
    seconds: float
    peak_bytes: int
    calibration_sha256: str | None
    card: QualityCard | None
