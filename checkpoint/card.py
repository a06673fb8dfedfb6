"""``QualityCard``: what was measured on a checkpoint, stored inside it as ``quality_card.json``."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import read_json, write_atomically

CARD_FILE = "quality_card.json"


@dataclass(frozen=True)
class QualityCard:
    """One comparison of a quantized model with its base, token by token, on one text.

    base_name, base_sha256    the base model, and its ``ModelSource.sha256()``
    data_name, data_sha256    the evaluation text, and the hash of the part that was read
    tokens, window, bos       tokens scored, tokens per window, and whether each window begins with BOS, as requests do
    perplexity_base, perplexity    exp of the mean negative log-likelihood (nats) of the scored tokens
    kl_mean, kl_median, kl_p90     KL(base || quantized) of the next-token distributions, in nats
    top1_agreement            share of tokens, 0 to 1, where both models rank the same token first
    kernel_path               which kernels computed it
    model_sha256              ``ModelSource.sha256()`` of the checkpoint that was measured: a copied card is seen
    calibration_name, calibration_sha256   the calibration text and its hash, empty where there was none
    calibration_overlap       share of the evaluated text's runs of eight words, 0 to 1, that were calibrated on
    versions                  package name -> version
    created                   ISO 8601 date
    scope                     what the numbers cover and what they do not
    intervals                 figure -> the ends of its 95 % interval, from the windows; none where there is only one
    """

    base_name: str
    base_sha256: str
    data_name: str
    data_sha256: str
    tokens: int
    window: int
    perplexity_base: float
    perplexity: float
    kl_mean: float
    kl_median: float
    kl_p90: float
    top1_agreement: float
    kernel_path: str
    created: str
    versions: dict[str, str] = field(default_factory=dict)
    bos: bool = False
    model_sha256: str = ""
    calibration_name: str = ""
    calibration_sha256: str = ""
    calibration_overlap: float = 0.0
    scope: str = ""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type == "float":
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise CheckpointError(f"quality card: {item.name} must be a finite number, not {value!r}")
                object.__setattr__(self, item.name, float(value))
            elif item.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise CheckpointError(f"quality card: {item.name} must be a positive integer, not {value!r}")
            elif item.type == "str" and not isinstance(value, str):
                raise CheckpointError(f"quality card: {item.name} must be a string, not {value!r}")
            elif item.type == "bool" and not isinstance(value, bool):
                raise CheckpointError(f"quality card: {item.name} must be true or false, not {value!r}")
        if not isinstance(self.versions, dict) or not all(
            isinstance(text, str) for pair in self.versions.items() for text in pair
        ):
            raise CheckpointError("quality card: versions must map package names to version strings")
        try:
            intervals = {name: (float(low), float(high)) for name, (low, high) in self.intervals.items()}
        except (AttributeError, TypeError, ValueError):
            raise CheckpointError("quality card: intervals must map names of figures to two numbers") from None
        object.__setattr__(self, "intervals", intervals)

    @property
    def perplexity_increase(self) -> float:
        """Relative: 0.03 where the quantized model's perplexity is 3 % above the base's."""
        return self.perplexity / self.perplexity_base - 1.0

    def end(self, figure: str, which: Literal["low", "high"]) -> float:
        """An end of the figure's 95 % interval, or the figure itself where it has none."""
        value = float(getattr(self, figure))
        low, high = self.intervals.get(figure, (value, value))
        return low if which == "low" else high

    def to_json(self) -> dict[str, Any]:
        intervals = {name: list(ends) for name, ends in self.intervals.items()}
        return {**dataclasses.asdict(self), "intervals": intervals}

    @classmethod
    def from_json(cls, content: object, where: str = "quality card") -> QualityCard:
        """Raise ``CheckpointError`` for an unknown, missing or ill-typed field."""
        if not isinstance(content, dict):
            raise CheckpointError(f"{where}: expected a JSON object")
        fields = {item.name: item for item in dataclasses.fields(cls)}
        unknown = sorted(set(content) - set(fields))
        if unknown:
            raise CheckpointError(f"{where}: unknown field {unknown[0]!r}; was it written by a newer qserve?")
        optional = {name for name, item in fields.items() if item.default is not item.default_factory}
        missing = [name for name in fields if name not in content and name not in optional]
        if missing:
            raise CheckpointError(f"{where}: field {missing[0]!r} is missing")
        return cls(**content)

    def summary(self) -> list[str]:
        """Lines for ``qserve inspect``."""
        lines = [
            f"base            {self.base_name} (sha256 {self.base_sha256[:12]})",
            f"text            {self.data_name} (sha256 {self.data_sha256[:12]}), "
            f"{self.tokens:,} tokens scored in windows of {self.window:,}"
            + (" that begin with BOS" if self.bos else "")
            + (", 95 % intervals in brackets" if self.intervals else ""),
            *self._calibration(),
            f"perplexity      {self.perplexity:.3f}, base {self.perplexity_base:.3f} "
            f"({self._with_interval('perplexity_increase', '+.2%')})",
            f"KL divergence   mean {self._with_interval('kl_mean', '.4f')}, median {self.kl_median:.4f}, "
            f"p90 {self.kl_p90:.4f} nats",
            f"top-1 agreement {self._with_interval('top1_agreement', '.2%')}",
            f"kernels         {self.kernel_path}",
            f"measured        {self.created}"
            + "".join(f", {package} {version}" for package, version in sorted(self.versions.items())),
        ]
        return lines + ([f"scope           {self.scope}"] if self.scope else [])

    def _calibration(self) -> list[str]:
        if not self.calibration_sha256:
            return []
        return [
            f"calibrated on   {self.calibration_name} (sha256 {self.calibration_sha256[:12]}), "
            f"{self.calibration_overlap:.1%} of the text's runs of eight words among it"
        ]

    def _with_interval(self, figure: str, form: str) -> str:
        text = f"{float(getattr(self, figure)):{form}}"
        if figure not in self.intervals:
            return text
        low, high = self.intervals[figure]
        return f"{text} [{low:{form}} to {high:{form}}]"


def read_card(directory: Path) -> QualityCard | None:
    """The card stored in a checkpoint directory, or None where there is none."""
    path = directory / CARD_FILE
    return QualityCard.from_json(read_json(path), str(path)) if path.exists() else None


def write_card(directory: Path, card: QualityCard) -> None:
    """Store ``card`` in the checkpoint at ``directory``, atomically: there is always the old card or the new one."""
    content = json.dumps(card.to_json(), indent=2, allow_nan=False) + "\n"
    write_atomically(directory / CARD_FILE, content.encode())
