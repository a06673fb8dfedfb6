"""Mixed precision: one scheme for each unit, from measured sensitivities and a budget.

The prediction adds the divergences of units, as second-order effects of independent errors add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize.mixed.sensitivity import Candidate, Sensitivities, Sensitivity

# Sizes that the table tells apart, over the whole range.
_CELLS = 1 << 16
_CURVE = 160


@dataclass(frozen=True)
class Tried:
    """A size (stored bits per quantized weight) and its mean KL divergence (nats), predicted or measured.

    ``label`` names it; predictions on the curve of best sizes have none.
    """

    label: str
    bits_per_weight: float
    kl: float
    measured: bool = False


@dataclass(frozen=True)
class Allocation:
    """``chosen`` is a scheme for each unit, in the order of ``sensitivities``; ``curve`` has the best mix for every
    size, the smallest first. Every divergence is multiplied by ``calibration_factor``."""

    sensitivities: Sensitivities
    chosen: tuple[Candidate, ...]
    curve: tuple[Tried, ...]
    calibration_factor: float

    @property
    def schemes(self) -> dict[str, WeightScheme | None]:
        """The scheme of each module; None keeps it in 16-bit floats."""
        pairs = zip(self.sensitivities, self.chosen, strict=True)
        return {module: candidate.scheme for unit, candidate in pairs for module in unit.modules}

    @property
    def bits_per_weight(self) -> float:
        return _bits(self.chosen) / _weights(self.sensitivities)

    @property
    def predicted_kl(self) -> float:
        """Mean, in nats."""
        return _kl(self.chosen) * self.calibration_factor

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The curve, every scheme that all units could have, and what was chosen."""
        return (*self.curve, *self._uniform(), Tried("chosen", self.bits_per_weight, self.predicted_kl))

    def lines(self) -> list[str]:
        """What was chosen and why: the usual scheme, then each unit that has another, the costliest first."""
        usual = self._usual()
        same = sum(candidate.scheme == usual for candidate in self.chosen)
        lines = [
            f"{self.bits_per_weight:.2f} bits per weight, predicted divergence {self.predicted_kl:.4f}: "
            f"{same} of {len(self.chosen)} units have {_name(usual)}"
        ]
        total = sum(kl for *_, kl in self._would_cost(usual)) or 1.0
        ranked = sorted(self._would_cost(usual), key=lambda entry: (-entry[2], entry[0].modules))
        for unit, candidate, kl in ranked:
            if candidate.scheme != usual:
                lines.append(
                    f"{short_name(unit)}: {_name(candidate.scheme)}; at {_name(usual)} it would be {kl / total:.1%} "
                    f"of the divergence, with {unit.weights / _weights(self.sensitivities):.1%} of the weights"
                )
        return lines

    def _usual(self) -> WeightScheme | None:
        """The scheme of most weights."""
        count: Counter[WeightScheme | None] = Counter()
        for unit, candidate in zip(self.sensitivities, self.chosen, strict=True):
            count[candidate.scheme] += unit.weights
        return count.most_common(1)[0][0]

    def _would_cost(self, scheme: WeightScheme | None) -> Iterator[tuple[Sensitivity, Candidate, float]]:
        """Each unit, its choice, and its divergence under ``scheme`` (its choice's where it cannot have that)."""
        for unit, candidate in zip(self.sensitivities, self.chosen, strict=True):
            alike = next((each for each in unit.candidates if each.scheme == scheme), candidate)
            yield unit, candidate, alike.kl

    def _uniform(self) -> Iterator[Tried]:
        offered = [{each.scheme: each for each in unit.candidates} for unit in self.sensitivities]
        for scheme in offered[0]:
            if all(scheme in each for each in offered):
                alike = [each[scheme] for each in offered]
                size = _bits(alike) / _weights(self.sensitivities)
                yield Tried(f"all {_name(scheme)}", size, _kl(alike) * self.calibration_factor)


def allocate(
    sensitivities: Sensitivities,
    *,
    target_bits: float | None = None,
    max_kl: float | None = None,
    calibration_factor: float = 1.0,
) -> Allocation:
    """Least predicted divergence within ``target_bits`` stored bits per weight (scales included, over all units), or
    the fewest bits within ``max_kl`` (nats). Exactly one of them is given.

    ``calibration_factor`` multiplies predictions: it is a measured divergence over the one predicted for the same mix.
    This is the multiple-choice knapsack, solved by dynamic programming over sizes. Raises ``UsageError`` where
    even the smallest, or the most precise, candidates do not fit.
    """
    assert (target_bits is None) != (max_kl is None) and sensitivities
    weights = _weights(sensitivities)
    table = _Table(sensitivities)
    if target_bits is not None:
        if table.smallest > target_bits * weights:
            raise UsageError(
                f"--target-bits {target_bits:g} is below {table.smallest / weights:.2f}, the fewest that the format "
                "and the loaders allow here"
            )
        chosen = table.within(target_bits * weights)
    else:
        assert max_kl is not None
        fitting = np.flatnonzero(table.best * calibration_factor <= max_kl)
        if not len(fitting):
            raise UsageError(
                f"no mix of schemes is expected within a divergence of {max_kl:g}: the most precise one has "
                f"{table.best[-1] * calibration_factor:.4g}; raise --max-kl"
            )
        chosen = table.at(int(fitting[0]))
    shown = np.unique(np.linspace(0, len(table.best) - 1, _CURVE).astype(int))
    curve = (
        Tried("", (table.smallest + int(at) * table.step) / weights, float(table.best[at]) * calibration_factor)
        for at in shown
    )
    return Allocation(sensitivities, chosen, tuple(curve), calibration_factor)


class _Table:
    """``best`` float64 [cells]: the least divergence within ``smallest`` + cell * ``step`` bits."""

    def __init__(self, sensitivities: Sensitivities) -> None:
        least = [min(candidate.bits for candidate in unit.candidates) for unit in sensitivities]
        most = [max(candidate.bits for candidate in unit.candidates) for unit in sensitivities]
        self._units = [unit.candidates for unit in sensitivities]
        self.smallest = sum(least)
        extra = [[each.bits - low for each in unit] for unit, low in zip(self._units, least, strict=True)]
        exact = math.gcd(*(size for sizes in extra for size in sizes))
        self.step = max(1, exact, -(-(sum(most) - self.smallest) // _CELLS))
        # Where the step does not divide the sizes, they are rounded to it both ways and the errors nearly cancel.
        # A larger size is never rounded to the smallest one, so cell 0 keeps within ``smallest``.
        self._sizes = [[max(size > 0, round(size / self.step)) for size in sizes] for sizes in extra]
        self.best = np.zeros(sum(map(max, self._sizes)) + 1)
        self._choices: list[NDArray[np.uint8]] = []
        for candidates, sizes in zip(self._units, self._sizes, strict=True):
            best, choice = np.full_like(self.best, math.inf), np.zeros(len(self.best), np.uint8)
            for number, (candidate, size) in enumerate(zip(candidates, sizes, strict=True)):
                cost = self.best[: len(best) - size] + candidate.kl
                better = cost < best[size:]
                best[size:][better] = cost[better]
                choice[size:][better] = number
            self.best = best
            self._choices.append(choice)

    def within(self, budget: float) -> tuple[Candidate, ...]:
        """The best mix of at most ``budget`` bits, which must be at least ``smallest``."""
        rounding = len(self._units) // 2 + 1
        cell = min(int((budget - self.smallest) / self.step) + rounding, len(self.best) - 1)
        while _bits(chosen := self.at(cell)) > budget:
            cell -= 1
        return chosen

    def at(self, cell: int) -> tuple[Candidate, ...]:
        """The candidates of the best mix within ``cell``, one for each unit."""
        chosen = []
        for candidates, sizes, choice in zip(self._units[::-1], self._sizes[::-1], self._choices[::-1], strict=True):
            number = int(choice[cell])
            chosen.append(candidates[number])
            cell -= sizes[number]
        return tuple(chosen[::-1])


def short_name(unit: Sensitivity) -> str:
    """``model.layers.3.self_attn.q_proj, k_proj, v_proj``; for many, such as experts, the first and how many more."""
    first, *others = unit.modules
    if len(others) > 2:
        return f"{first} and {len(others)} more"
    return ", ".join([first, *(other.rpartition(".")[2] for other in others)])


def _bits(chosen: Sequence[Candidate]) -> int:
    return sum(candidate.bits for candidate in chosen)


def _kl(chosen: Sequence[Candidate]) -> float:
    return math.fsum(candidate.kl for candidate in chosen)


def _weights(sensitivities: Sensitivities) -> int:
    return sum(unit.weights for unit in sensitivities)


def _name(scheme: WeightScheme | None) -> str:
    return "16-bit floats" if scheme is None else str(scheme)
