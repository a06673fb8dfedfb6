"""``Recipe`` and ``Pace``: the choices of the demo, how long they take here, and which of them ends in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qserve.checkpoint.errors import UsageError

WINDOW = 512
"""Tokens of a calibration sample, and of a window that is evaluated."""
LIMIT = 165.0
"""Seconds: three minutes, less the possible error of a forecast."""
EFFORTS = ("fast", "normal")


@dataclass(frozen=True)
class Recipe:
    """Calibration samples, the effort of GPTQ, and tokens to evaluate. Raises ``UsageError`` for invalid values."""

    samples: int
    effort: str
    tokens: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"--samples must be at least 1, not {self.samples}")
        if self.effort not in EFFORTS:
            raise UsageError(f"--effort of the demo must be {' or '.join(EFFORTS)}, not {self.effort!r}")
        if self.tokens < WINDOW:
            raise UsageError(f"--tokens must be at least {WINDOW}, one window, not {self.tokens}")

    def __str__(self) -> str:
        return f"{self.samples} samples of {WINDOW} tokens, effort {self.effort}, {self.tokens:,} tokens evaluated"


LADDER = (
    Recipe(48, "normal", 4096),
    Recipe(24, "normal", 4096),
    Recipe(12, "normal", 4096),
    Recipe(24, "fast", 4096),
)
"""Best first. Each passes the gates of the demo; with 1,024 tokens the last one's interval is too wide for that of
perplexity. The last two also answer its question; 16 samples with effort fast diverge no more, but do not answer it."""


def ladder(samples: int | None = None, effort: str | None = None, tokens: int | None = None) -> tuple[Recipe, ...]:
    """``LADDER`` with the given values in place of its own. Raises ``UsageError`` for invalid values."""
    given = {"samples": samples, "effort": effort, "tokens": tokens}
    fixed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return tuple(replace(recipe, **fixed) for recipe in LADDER)


@dataclass(frozen=True)
class Pace:
    """Seconds: to quantize with effort normal, first without samples and then for each one; the share of that time that
    effort fast takes; to score a token with both models; and for all else."""

    quantize: float
    sample: float
    fast: float
    token: float
    rest: float

    @classmethod
    def of(cls, few: tuple[int, float], more: tuple[int, float], fast: float, token: float, rest: float) -> Pace:
        """From the seconds of quantizing with ``few`` samples, with ``more``, and with ``more`` and effort ``fast``.
        Measurements on a busy machine may contradict each other, so they are made to agree."""
        sample = min(max(0.0, (more[1] - few[1]) / (more[0] - few[0])), more[1] / more[0])
        return cls(more[1] - sample * more[0], sample, min(1.0, fast / more[1]), token, rest)

    def quantizing(self, samples: int, effort: str) -> float:
        """Seconds until the checkpoint is written."""
        return (self.quantize + self.sample * samples) * (self.fast if effort == "fast" else 1.0)

    def seconds(self, recipe: Recipe) -> float:
        """From the demo's start to its end."""
        return self.rest + self.quantizing(recipe.samples, recipe.effort) + self.token * recipe.tokens


def choose(pace: Pace, recipes: Sequence[Recipe] = LADDER, limit: float = LIMIT) -> Recipe:
    """The first of ``recipes`` that ends within ``limit`` seconds; the last where none does."""
    return next((recipe for recipe in recipes if pace.seconds(recipe) <= limit), recipes[-1])
