"""``Stage``: which layers of a model a rank of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate


@dataclass(frozen=True)
class Stage:
    """The layers from ``first`` up to ``end``, None for the last of the model; stage ``rank`` of ``size``. The first
    one also has the embedding, and the last one the norm and the head."""

    rank: int = 0
    size: int = 1
    first: int = 0
    end: int | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def layers(self, count: int) -> range:
        """Its layers in a model of ``count``."""
        return range(count)[self.first : self.end]


def divide(nbytes: Sequence[int], size: int) -> list[Stage]:
    """``size`` stages of layers with ``nbytes`` each, at least one for each stage. The sum of the squares of the
    stages' bytes is the least that can be had, so they are as even as layers allow."""
    before = [0, *accumulate(nbytes)]
    count = len(nbytes)

    @cache
    def best(first: int, stages: int) -> tuple[int, tuple[int, ...]]:
        """The least sum for so many stages from the layer ``first`` on, and where each of them ends."""
        if stages == 1:
            return (before[count] - before[first]) ** 2, (count,)
        found = []
        for end in range(first + 1, count - stages + 2):
            rest, ends = best(end, stages - 1)
            found.append((rest + (before[end] - before[first]) ** 2, (end, *ends)))
        return min(found)

    ends = best(0, size)[1]
    return [Stage(rank, size, *bounds) for rank, bounds in enumerate(zip((0, *ends), ends))]
