"""``Fleet``: replicas, a router before them, and an autoscaler beside them, from the first arrival to the last end.

Discrete events in order of time. At the same time, the arrival comes first, then the autoscaler, then the replicas by
number. Nothing is random here: the same arrivals give the same outcome.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.evals.simulator.cost import CostModel
from qserve.evals.simulator.records import Records, Usage
from qserve.evals.simulator.replica import Replica, ReplicaConfig
from qserve.evals.simulator.traffic import Arrival, prompt_tokens
from qserve.runtime.blocks import chain_digests
from qserve.runtime.router import POLICIES, Prompt, Router


@dataclass(frozen=True)
class Autoscale:
    """The rule for the number of replicas: by the depth of their queues, checked every ``interval`` seconds.

    Attributes:
        most: replicas at most; the fleet's initial number is the least.
        queue: waiting requests per replica above which another one is started, one at a time.
        start_delay: seconds until a started replica takes requests; it is paid for from its start.
        idle: seconds during which nothing waits and one replica less would have room for all; then one takes no more
            requests, and ends with those it has.
        interval: seconds between two checks.
    """

    most: int
    queue: float = 4.0
    start_delay: float = 60.0
    idle: float = 120.0
    interval: float = 5.0

    def __post_init__(self) -> None:
        if self.most < 1:
            raise UsageError(f"--max-replicas must be at least 1, not {self.most}")
        for name, value in (("--scale-queue", self.queue), ("--start-delay", self.start_delay), ("idle", self.idle)):
            if not 0 <= value < math.inf:
                raise UsageError(f"{name} must be at least 0, not {value}")
        if not 0 < self.interval < math.inf:
            raise UsageError("the interval of the autoscaler must be above 0")


@dataclass(frozen=True)
class FleetConfig:
    """The initial ``replicas``, and how requests reach them."""

    replica: ReplicaConfig
    replicas: int = 1
    routing: str = "least-loaded"
    autoscale: Autoscale | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UsageError(f"--replicas must be at least 1, not {self.replicas}")
        if self.autoscale and self.autoscale.most < self.replicas:
            raise UsageError(f"--max-replicas {self.autoscale.most} is below --replicas {self.replicas}")
        if self.routing not in POLICIES:
            raise UsageError(f"unknown routing {self.routing!r}: choose from {', '.join(POLICIES)}")


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation. ``scaling``: (time, replicas that take requests) at the start and at each change."""

    records: Records
    usages: tuple[Usage, ...]
    seconds: float
    scaling: tuple[tuple[float, int], ...]


class Fleet:
    """One simulation. Its own state is which replicas live and what happens next."""

    def __init__(self, config: FleetConfig, cost: CostModel) -> None:
        self.config = config
        self.records = Records()
        self._cost = cost
        self._router = Router(config.routing)
        self._replicas: dict[int, Replica] = {}  # live replicas
        self._taking: list[Replica] = []  # replicas that get requests, by number
        self._usages: list[Usage] = []
        self._events: list[tuple[float, int, int]] = []  # time, replica, version of its end; -1 is the autoscaler
        self._starting: list[tuple[float, Replica]] = []
        self._calm_since = 0.0
        self._scaling: list[tuple[float, int]] = []
        self._now = 0.0

    def run(self, arrivals: Iterable[Arrival], progress: Callable[[int], None] | None = None) -> Outcome:
        """Serve all ``arrivals``, which are in order of time; now and then ``progress`` is told how many came."""
        for _ in range(self.config.replicas):
            self._take(self._new_replica())
        self._scaling.append((0.0, len(self._taking)))
        if self.config.autoscale:
            heapq.heappush(self._events, (self.config.autoscale.interval, -1, 0))
        for index, arrival in enumerate(arrivals):
            if arrival.time < self._now:
                raise ValueError(f"arrival {index} comes before the one ahead of it")
            self._run_until(arrival.time)
            self._now = arrival.time
            self._arrive(arrival, index)
            if progress and index % 1000 == 0:
                progress(index)
        self._run_until(math.inf)
        for replica in self._replicas.values():
            self._usages.append(replica.close(self._now))
        return Outcome(self.records, tuple(self._usages), self._now, tuple(self._scaling))

    def _run_until(self, time: float) -> None:
        """Do everything that happens before ``time``; after the last arrival, until no replica has work."""
        events = self._events
        while events and events[0][0] < time:
            now, number, version = heapq.heappop(events)
            if number < 0:
                if time == math.inf and not any(replica.load for replica in self._replicas.values()):
                    continue  # no request will come, so it need not look again
                self._now = now
                self._scale(now)
                continue
            replica = self._replicas.get(number)
            if replica is None or replica.version != version:
                continue  # its end was moved forward since
            self._now = now
            if replica.end is not None:
                replica.finish()
            if replica.begin(now):
                self._schedule(replica)
            elif replica.draining:
                self._usages.append(self._replicas.pop(replica.number).close(now))

    def _arrive(self, arrival: Arrival, index: int) -> None:
        size, digests = self.config.replica.block_size, list[bytes]()
        if self._router.policy == "prefix-aware" and self.config.replica.prefix_caching:
            digests = chain_digests(prompt_tokens(arrival, index), size)
        placement = self._router.place(Prompt(digests, -(-arrival.prompt // size)))
        assert placement is not None, "a fleet always has a replica that takes requests"
        replica = self._replicas[int(placement.replica)]
        version = replica.version
        if not replica.add(arrival, index, placement, digests):
            placement.refused()
            self.records.rejected += 1
        elif replica.end is None or replica.version != version:
            self._schedule(replica)

    def _schedule(self, replica: Replica) -> None:
        """Queue its next event: at its end or, where it is idle, now, after all arrivals of this moment."""
        time = self._now if replica.end is None else replica.end
        heapq.heappush(self._events, (time, replica.number, replica.version))

    def _new_replica(self) -> Replica:
        number = len(self._usages) + len(self._replicas)
        replica = Replica(number, self.config.replica, self._cost, self.records, self._now)
        self._replicas[number] = replica
        return replica

    def _take(self, replica: Replica) -> None:
        """Let it get requests."""
        self._taking.append(replica)
        self._router.add(str(replica.number), capacity=self.config.replica.num_blocks)

    def _scale(self, now: float) -> None:
        """One check of the autoscaler."""
        config = self.config.autoscale
        assert config is not None
        before = len(self._taking)
        for ready, replica in self._starting:
            if ready <= now:
                self._take(replica)
        self._starting = [(ready, replica) for ready, replica in self._starting if ready > now]
        waiting = sum(replica.num_waiting for replica in self._taking)
        places = self.config.replica.scheduler.max_num_seqs * (len(self._taking) - 1)
        if waiting or self._starting or sum(replica.load for replica in self._taking) > places:
            self._calm_since = now
        count = len(self._taking) + len(self._starting)
        if waiting > config.queue * count and count < config.most:
            self._starting.append((now + config.start_delay, self._new_replica()))
        elif now - self._calm_since >= config.idle and len(self._taking) > self.config.replicas:
            self._retire(min(self._taking, key=lambda replica: (replica.load, -replica.number)), now)
            self._calm_since = now
        if len(self._taking) != before:
            self._scaling.append((now, len(self._taking)))
        heapq.heappush(self._events, (now + config.interval, -1, 0))

    def _retire(self, replica: Replica, now: float) -> None:
        """Give it no more requests; it ends with its last one."""
        self._taking.remove(replica)
        self._router.remove(str(replica.number))
        replica.draining = True
        if not replica.load:
            self._usages.append(self._replicas.pop(replica.number).close(now))
