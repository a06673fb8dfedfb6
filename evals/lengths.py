"""``Lengths``: how many tokens requests have: always as many, or drawn from a distribution."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from qserve.checkpoint.errors import UsageError

MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """How many tokens: always the median, or lognormal around it. ``sigma`` is of the logarithm, 0 is fixed.

    ``mix``: one of these instead, each as likely. ``span``: any from its first to its last instead, each as likely.
    """

    median: int
    sigma: float = 0.0
    mix: tuple[int, ...] = ()
    span: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """``200``, ``lognormal:200:0.8``, ``uniform:128:4096`` or ``10/50/200``. Raises ``UsageError``."""
        try:
            match text.split(":"):
                case ["lognormal", median, sigma]:
                    found = cls(int(median), float(sigma))
                case ["uniform", least, most]:
                    found = cls((int(least) + int(most)) // 2, span=(int(least), int(most)))
                case [numbers]:
                    each = tuple(map(int, numbers.split("/")))
                    found = cls(each[0], mix=each if len(each) > 1 else ())
                case _:
                    raise ValueError
        except ValueError:
            raise UsageError(
                f"{option} must be like 200, lognormal:200:0.8, uniform:128:4096 or 10/50/200, not {text!r}"
            ) from None
        sizes = (found.median, *found.mix, *(found.span or ()))
        if not all(1 <= size <= MAX_TOKENS for size in sizes) or not 0 <= found.sigma <= 5:
            raise UsageError(f"{option} must be 1..{MAX_TOKENS} tokens with a sigma of 0..5, not {text!r}")
        if found.span is not None and found.span[0] > found.span[1]:
            raise UsageError(f"{option}: uniform goes from the least to the most, not {text!r}")
        return found

    @property
    def longest(self) -> int:
        """The longest of a mix or a span; else the median, for a tail has no end."""
        return max((*self.mix, *(self.span or ())), default=self.median)

    @property
    def mean(self) -> float:
        """The mean of what is drawn, where nothing is cut."""
        if self.mix:
            return sum(self.mix) / len(self.mix)
        if self.span is not None:
            return sum(self.span) / 2
        return self.median * math.exp(self.sigma**2 / 2)

    @property
    def mean_square(self) -> float:
        """The mean of the squares of what is drawn."""
        if self.mix:
            return sum(length**2 for length in self.mix) / len(self.mix)
        if self.span is not None:
            width = self.span[1] - self.span[0]
            return width * (width + 2) / 12 + self.mean**2
        return self.median**2 * math.exp(2 * self.sigma**2)

    def spread(self, count: int) -> tuple[int, ...]:
        """``count`` lengths that stand for all, the same part of what is drawn around each."""
        parts = [(index + 0.5) / count for index in range(count)]
        if self.mix:
            return self.mix
        if self.span is not None:
            return tuple(round(self.span[0] + part * (self.span[1] - self.span[0])) for part in parts)
        if not self.sigma:
            return (self.median,)
        normal = NormalDist(math.log(self.median), self.sigma)
        return tuple(max(1, round(math.exp(normal.inv_cdf(part)))) for part in parts)

    def __str__(self) -> str:
        if self.mix:
            return "/".join(map(str, self.mix))
        if self.span is not None:
            return f"uniform:{self.span[0]}:{self.span[1]}"
        return f"lognormal:{self.median}:{self.sigma:g}" if self.sigma else str(self.median)

    def draw(self, random: random.Random, most: int) -> int:
        """One length, at most ``most``: a tail longer than the context is cut."""
        if self.mix:
            return min(random.choice(self.mix), most)
        if self.span is not None:
            return min(random.randint(*self.span), most)
        if not self.sigma:
            return min(self.median, most)
        return max(1, min(most, round(self.median * math.exp(random.gauss(0.0, self.sigma)))))
