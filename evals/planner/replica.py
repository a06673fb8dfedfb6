"""``Replica``: one copy of a model under steady traffic: how much it runs at once, how fast, and how much it can take.

Prompts are computed in chunks between the decodes (continuous batching), so both share the time. Let ``B`` requests
run, and let prompts take the share ``rho`` of the time. Then decodes of ``T(B)`` seconds come every
``T(B) / (1 - rho)`` seconds, and Little's law gives the rest: ``B = rate * output * TPOT``. The waiting time for
earlier prompts is that of a queue with random arrivals and equal work, ``rho * S / (2 (1 - rho))``. All are means;
``qserve simulate`` gives percentiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from qserve.evals.planner.demand import Traffic
from qserve.evals.planner.replica_roofline import ReplicaRoofline
from qserve.evals.slo import Slo


@dataclass(frozen=True)
class Load:
    """A replica at ``batch`` running requests: ``rate`` in requests per second, ``ttft`` and ``tpot`` in seconds,
    ``decode`` the seconds of one step, ``prefilling`` the share of the time that prompts take."""

    batch: int
    rate: float
    ttft: float
    tpot: float
    decode: float
    prefilling: float
    waiting: float


@dataclass(frozen=True)
class Replica:
    """``chunk``: prompt tokens that are computed in one step."""

    roofline: ReplicaRoofline
    traffic: Traffic
    slo: Slo
    chunk: int

    @property
    def context(self) -> float:
        """Tokens that a running request attends to, on average over its output."""
        return self.traffic.prompt + self.traffic.output / 2

    @property
    def chunks(self) -> int:
        return -(-self.traffic.computed // self.chunk)

    @cached_property
    def prefill(self) -> float:
        """Seconds of work of one prompt: of what the prefix cache does not have of it."""
        return self.roofline.prefill(self.traffic.prompt, self.chunk, self.traffic.computed)

    @property
    def prefill_latency(self) -> float:
        """Seconds until a prompt is through: with stages, its chunks follow each other through the pipeline."""
        stages = self.roofline.layout.pp
        return self.prefill * (self.chunks + stages - 1) / (self.chunks * stages)

    @cached_property
    def fits(self) -> int:
        """Requests at once that the memory holds, every one at its full length and with a prefix of its own."""
        return self.roofline.largest_batch(self.traffic.tokens)

    @cached_property
    def largest(self) -> int:
        """Requests at once that fit and stay within the limits; 0 where not even one does."""
        return _last(self.fits, lambda batch: self._within(self.at(batch)))

    @cached_property
    def full(self) -> Load:
        """The load at ``largest``: the most that it can take."""
        return self.at(self.largest)

    def at(self, batch: int) -> Load:
        """The load with ``batch`` requests running."""
        decode = self.roofline.decode(batch, self.context)
        work = self.prefill / self.roofline.layout.pp
        tpot = decode + batch * work / self.traffic.output
        prefilling = 1 - decode / tpot
        waiting = prefilling * work / (2 * (1 - prefilling))
        # Each chunk shares its step with the decodes, and the request arrives while a step is under way.
        ttft = waiting + self.prefill_latency + (self.chunks + 1) * decode
        return Load(batch, batch / (self.traffic.output * tpot), ttft, tpot, decode, prefilling, waiting)

    def under(self, rate: float) -> Load:
        """The load at ``rate`` requests per second, which must be possible: the smallest batch that keeps up."""
        return self.at(min(self.largest, 1 + _last(self.largest, lambda batch: self.at(batch).rate < rate)))

    def _within(self, load: Load) -> bool:
        return load.ttft <= self.slo.ttft and load.tpot <= self.slo.tpot


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """The last number of 1 to ``most`` up to which ``holds`` is true; 0 where there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
