"""``Replica``: one copy of a model under steady traffic: how much it runs at once, how fast, and how much it can take.

Prompts are computed in chunks between the decodes (continuous batching), so both share the time. With ``B`` requests
running and prompts taking the share ``rho`` of it, a decode of ``T(B)`` seconds is ``T(B) / (1 - rho)`` apart from the
next, and Little's law says the rest: ``B = rate * output * TPOT``. Waiting for the prompts before one's own is that of
a queue with random arrivals, ``rho * E[S^2] / (2 E[S] (1 - rho))`` (Pollaczek and Khinchine). All are means;
``qserve simulate`` answers for percentiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from qserve.evals.planner.demand import Traffic
from qserve.evals.planner.replica_roofline import ReplicaRoofline, last
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
        """Tokens that a running request looks back at, on average over its output."""
        return self.traffic.prompt + self.traffic.running_output / 2

    @property
    def chunks(self) -> int:
        return -(-self.traffic.computed // self.chunk)

    @cached_property
    def prefill(self) -> float:
        """Seconds of work of one prompt on average: of what the prefix cache does not have of it."""
        return fmean(self._prefills)

    @cached_property
    def _prefills(self) -> list[float]:
        traffic = self.traffic
        return [self.roofline.prefill(n, self.chunk, traffic.computed_of(n)) for n in traffic.prompt_lengths]

    @cached_property
    def variation(self) -> float:
        """The mean square of that work over the square of its mean: 1 where all prompts are equal."""
        return fmean(seconds**2 for seconds in self._prefills) / self.prefill**2

    @property
    def prefill_latency(self) -> float:
        """Seconds until a prompt is through: with stages, its chunks follow each other through the pipeline."""
        stages = self.roofline.layout.pp
        return self.prefill * (self.chunks + stages - 1) / (self.chunks * stages)

    @cached_property
    def fits(self) -> int:
        """Requests at once that the memory holds, every one at its full length and with a prefix of its own."""
        return self.roofline.largest_batch(self.traffic.held)

    @cached_property
    def largest(self) -> int:
        """Requests at once that fit and stay within the limits; 0 where not even one does."""
        return last(self.fits, lambda batch: self._within(self.at(batch)))

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
        waiting = prefilling * work * self.variation / (2 * (1 - prefilling))
        # Each of its chunks shares its step with the decodes, and it arrives while a step is under way.
        ttft = waiting + self.prefill_latency + (self.chunks + 1) * decode
        return Load(batch, batch / (self.traffic.output * tpot), ttft, tpot, decode, prefilling, waiting)

    def under(self, rate: float) -> Load:
        """The load at ``rate`` requests per second, which must be possible: the smallest batch that keeps up."""
        return self.at(min(self.largest, 1 + last(self.largest, lambda batch: self.at(batch).rate < rate)))

    def _within(self, load: Load) -> bool:
        return load.ttft <= self.slo.ttft and load.tpot <= self.slo.tpot
