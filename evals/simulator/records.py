"""``Records``: the times of every request, and ``Usage``: the use of every replica. Numbers only.

Columns of numbers, not objects: a million requests are 64 MB.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from qserve.evals.slo import Slo


@dataclass
class Records:
    """One entry in each column for each finished request, in the order they finished; times in seconds.

    ``scheduled`` is the start of the first step that held it, ``first`` the end of the step of its first token.
    """

    index: array[int] = field(default_factory=lambda: array("q"))
    arrival: array[float] = field(default_factory=lambda: array("d"))
    scheduled: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    prompt: array[int] = field(default_factory=lambda: array("q"))
    output: array[int] = field(default_factory=lambda: array("q"))
    rejected: int = 0

    def add(
        self, index: int, arrival: float, scheduled: float, first: float, end: float, prompt: int, output: int
    ) -> None:
        self.index.append(index)
        self.arrival.append(arrival)
        self.scheduled.append(scheduled)
        self.first.append(first)
        self.end.append(end)
        self.prompt.append(prompt)
        self.output.append(output)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return max(self.end) - min(self.arrival) if self.index else 0.0

    def ttft(self) -> list[float]:
        """Time to first token of each request."""
        return [first - arrival for first, arrival in zip(self.first, self.arrival)]

    def tpot(self) -> list[float]:
        """Time per output token after the first, of requests that have such tokens."""
        return [
            (end - first) / (output - 1)
            for end, first, output in zip(self.end, self.first, self.output)
            if output > 1
        ]

    def e2e(self) -> list[float]:
        return [end - arrival for end, arrival in zip(self.end, self.arrival)]

    def queue(self) -> list[float]:
        """Time until the first step that held it, of each request."""
        return [scheduled - arrival for scheduled, arrival in zip(self.scheduled, self.arrival)]

    def good(self, slo: Slo) -> int:
        """Requests that kept the objective; with one output token there is no TPOT to miss."""
        return sum(
            first - arrival <= slo.ttft and (output < 2 or (end - first) / (output - 1) <= slo.tpot)
            for arrival, first, end, output in zip(self.arrival, self.first, self.end, self.output)
        )


@dataclass
class Usage:
    """The use of one replica. ``sequences`` and ``blocks`` are integrals over its busy time, in sequence and block
    seconds; ``rows`` counts the sequences of every step."""

    born: float = 0.0
    died: float | None = None
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    busy: float = 0.0
    sequences: float = 0.0
    blocks: float = 0.0
    peak_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def step(self, seconds: float, tokens: int, sequences: int, blocks: int) -> None:
        """Count one step."""
        self.steps += 1
        self.rows += sequences
        self.tokens += tokens
        self.busy += seconds
        self.sequences += sequences * seconds
        self.blocks += blocks * seconds
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks


def percentiles(values: Sequence[float], wanted: Sequence[int] = (50, 90, 95, 99)) -> dict[str, float]:
    """``mean`` and ``p50`` ... by nearest rank; empty where there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"mean": math.fsum(ordered) / len(ordered), **dict(_ranks(ordered, wanted))}


def _ranks(ordered: Sequence[float], wanted: Sequence[int]) -> Iterator[tuple[str, float]]:
    for percent in wanted:
        yield f"p{percent}", ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
