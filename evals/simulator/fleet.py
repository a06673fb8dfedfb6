"""``Fleet``: replicas, a router before them, and an autoscaler beside them, from the first arrival to the last end.

Discrete events in order of time. At the same time, the arrival comes first, then the autoscaler, then the replicas by
number. Nothing is random here: the same arrivals give the same outcome.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from qserve.checkpoint.errors import UsageError
from qserve.evals.simulator.cost import CostModel
from qserve.evals.simulator.records import Records, Usage
from qserve.evals.simulator.replica import Replica, ReplicaConfig
from qserve.evals.simulator.traffic import Arrival, prompt_tokens
from qserve.runtime.autoscale import Autoscale, Autoscaler, Load
from qserve.runtime.digests import chain_digests
from qserve.runtime.router import LONG_PROMPT, POLICIES, WORTH_FETCHING, Placement, Prompt, Router

_FETCHED = -2  # instead of a replica's number: the blocks of a request have come


@dataclass(frozen=True)
class KvTransfer:
    """Replicas fetch KV blocks from each other: each takes ``block_seconds``, and a request ``latency`` more. Of
    ``prefill`` replicas, the first ones, the others get the blocks of all long prompts."""

    block_seconds: float
    latency: float = 0.002
    prefill: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.block_seconds < math.inf and 0 <= self.latency < math.inf):
            raise UsageError("--kv-transfer needs times of at least 0")


@dataclass(frozen=True)
class FleetConfig:
    """The initial ``replicas``, and how requests reach them.

    ``start_delay``: seconds until a replica that the autoscaler starts takes requests; it is paid for from its start.
    ``reports``: replicas tell a prefix-aware router which blocks they hold, after each step with a prompt
    in it; otherwise it predicts that.
    ``interference``: replicas share one machine, and a step takes this many times as long while all others compute; in
    proportion where some of them do as it begins.
    """

    replica: ReplicaConfig
    replicas: int = 1
    routing: str = "least-loaded"
    autoscale: Autoscale | None = None
    start_delay: float = 60.0
    reports: bool = True
    transfer: KvTransfer | None = None
    interference: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.interference < math.inf:
            raise UsageError(f"--interference must be at least 1, not {self.interference}")
        if self.replicas < (0 if self.autoscale else 1):
            raise UsageError(f"--replicas must be at least 1, or 0 with --max-replicas, not {self.replicas}")
        if self.interference > 1 and self.replicas == 1 and self.autoscale is None:
            raise UsageError("--interference is between engines: give --replicas or --max-replicas")
        if not 0 <= self.start_delay < math.inf:
            raise UsageError(f"--start-delay must be at least 0, not {self.start_delay}")
        if self.transfer is not None:
            if self.routing != "prefix-aware" or not (self.replica.prefix_caching and self.replica.offload_blocks):
                raise UsageError("--kv-transfer needs --routing prefix-aware and --kv-offload-blocks")
            if not 0 <= self.transfer.prefill < self.replicas or (self.transfer.prefill and self.autoscale):
                raise UsageError("--prefill-replicas are fewer than --replicas, without --max-replicas")
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
        self._finds_prefixes = config.routing == "prefix-aware" and config.replica.prefix_caching
        self._reports = self._finds_prefixes and config.reports
        self._replicas: dict[int, Replica] = {}  # live replicas
        self._taking: list[Replica] = []  # replicas that get requests, by number
        self._usages: list[Usage] = []
        self._events: list[tuple[float, int, int]] = []  # time, replica, version of its end; -1 is the autoscaler
        self._starting: list[tuple[float, Replica]] = []
        self._held: list[tuple[Arrival, int]] = []  # requests that came while no replica took any
        self._begun = 0  # requests whose answers have begun, of replicas that have ended
        self._autoscaler = Autoscaler(config.autoscale) if config.autoscale else None
        self._scaling: list[tuple[float, int]] = []
        self._coming: dict[int, tuple[Arrival, Placement, list[bytes], int]] = {}  # by request; blocks to be fetched
        prefill = config.transfer.prefill if config.transfer else 0
        self._prefillers = {str(number) for number in range(prefill)}
        self._now = 0.0

    def run(self, arrivals: Iterable[Arrival], progress: Callable[[int], None] | None = None) -> Outcome:
        """Serve all ``arrivals``, which are in order of time; now and then ``progress`` is told how many came."""
        for _ in range(self.config.replicas):
            self._take(self._new_replica())
        self._scaling.append((0.0, len(self._taking)))
        if self._autoscaler:
            heapq.heappush(self._events, (self._autoscaler.rule.interval, -1, 0))
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
            if number == _FETCHED:
                self._now = now
                self._fetched(version)
                continue
            if number < 0:
                waiting = self._held or self._coming or any(each.load for each in self._replicas.values())
                if time == math.inf and not waiting:
                    continue  # no request will come, so it need not look again
                assert self._autoscaler is not None
                self._now = now
                self._scale(self._autoscaler, now)
                continue
            replica = self._replicas.get(number)
            if replica is None or replica.version != version:
                continue  # its end was moved forward since
            self._now = now
            if replica.end is not None and replica.finish() and self._reports and not replica.draining:
                self._router.report(str(replica.number), *replica.blocks.changes())
            if replica.begin(now, self._slowed(replica)):
                self._schedule(replica)
            elif replica.draining:
                self._end(replica, now)

    def _arrive(self, arrival: Arrival, index: int, computed: bool = False) -> None:
        """Send a request to a replica. ``computed``: a replica of the prefill role has its prompt."""
        size, digests = self.config.replica.block_size, list[bytes]()
        if self._finds_prefixes:
            digests = chain_digests(prompt_tokens(arrival, index), size)
        prompt = Prompt(digests, -(-arrival.prompt // size))
        if self._prefillers and not computed and self._is_long(prompt):
            others = {str(number) for number in self._replicas} - self._prefillers
            placement = self._router.place(prompt, without=others)
            assert placement is not None
            first = replace(arrival, output=1)
            self._give(first, index, placement, digests, lambda: self._arrive(arrival, index, computed=True))
            return
        placement = self._router.place(prompt, without=self._prefillers)
        if placement is None:
            self._held.append((arrival, index))
        elif count := self._num_fetched(placement, digests):
            assert self.config.transfer is not None
            seconds = self.config.transfer.latency + count * self.config.transfer.block_seconds
            self._coming[index] = arrival, placement, digests, count
            heapq.heappush(self._events, (self._now + seconds, _FETCHED, index))
        else:
            self._give(arrival, index, placement, digests)

    def _give(
        self, arrival: Arrival, index: int, placement: Placement, digests: list[bytes],
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """A request is at its replica."""
        replica = self._replicas[int(placement.replica)]
        version = replica.version
        if not replica.add(arrival, index, placement, digests, now=self._now, then=then):
            placement.refused()
            self.records.rejected += 1
        elif replica.end is None or replica.version != version:
            self._schedule(replica)

    def _is_long(self, prompt: Prompt) -> bool:
        """Whether a prompt is worth a call to a replica that computes it for others."""
        decoding = (str(each.number) for each in self._taking if str(each.number) not in self._prefillers)
        return prompt.blocks - self._router.holder(prompt.digests, decoding)[1] >= LONG_PROMPT

    def _num_fetched(self, placement: Placement, digests: Sequence[bytes]) -> int:
        """Blocks that its replica fetches from another one for a request."""
        transfer, size = self.config.transfer, self.config.replica.block_size
        if transfer is None:
            return 0
        others = (name for each in self._taking if (name := str(each.number)) != placement.replica)
        count = self._router.holder(digests, others)[1] - placement.cached
        if count < WORTH_FETCHING:
            return 0
        seconds = transfer.latency + count * transfer.block_seconds
        return count if seconds < self._cost.seconds(count * size, 0, 0, 0) else 0

    def _fetched(self, index: int) -> None:
        arrival, placement, digests, count = self._coming.pop(index)
        replica = self._replicas.get(int(placement.replica))
        if replica is None:  # it has ended meanwhile
            placement.ended()
            self._arrive(arrival, index, computed=True)
            return
        replica.receive(digests[placement.cached : placement.cached + count])
        self._give(arrival, index, placement, digests)

    def _schedule(self, replica: Replica) -> None:
        """Queue its next event: at its end or, where it is idle, now, after all arrivals of this moment."""
        time = self._now if replica.end is None else replica.end
        heapq.heappush(self._events, (time, replica.number, replica.version))

    def _slowed(self, replica: Replica) -> float:
        """How many times as long a step of it takes that begins now."""
        if self.config.interference == 1.0 or len(self._replicas) == 1:
            return 1.0
        busy = sum(each.end is not None for each in self._replicas.values() if each is not replica)
        return 1.0 + (self.config.interference - 1.0) * busy / (len(self._replicas) - 1)

    def _new_replica(self) -> Replica:
        number, one = len(self._usages) + len(self._replicas), self.config.replica
        if self.config.interference > 1.0:
            one = replace(one, leaps=False)  # each step is slowed by what others do as it begins
        replica = Replica(number, one, self._cost, self.records, self._now)
        self._replicas[number] = replica
        return replica

    def _take(self, replica: Replica) -> None:
        """Let it get requests."""
        self._taking.append(replica)
        self._router.add(str(replica.number), capacity=self.config.replica.num_blocks)
        if self._reports:
            self._router.report(str(replica.number), replica.blocks.watch(), [], whole=True)

    def _scale(self, autoscaler: Autoscaler, now: float) -> None:
        """One decision of the autoscaler."""
        before = len(self._taking)
        for ready, replica in self._starting:
            if ready <= now:
                self._take(replica)
        self._starting = [(ready, replica) for ready, replica in self._starting if ready > now]
        if self._taking:
            arrivals, self._held = self._held, []
            for arrival, index in arrivals:
                self._arrive(arrival, index)
        live, held = self._replicas.values(), len(self._held)
        load = Load(
            ready=len(self._taking),
            starting=len(self._starting),
            ongoing=held + sum(each.load for each in live),
            waiting=held + sum(each.num_waiting for each in live),
            begun=self._begun + sum(each.begun for each in live),
        )
        count, wanted = load.ready + load.starting, autoscaler.decide(now, load)
        for _ in range(wanted - count):
            self._starting.append((now + self.config.start_delay, self._new_replica()))
        for _ in range(count - wanted):
            if self._starting:
                self._end(self._starting.pop()[1], now)
                continue
            self._retire(min(self._taking, key=lambda replica: (replica.load, -replica.number)), now)
        if len(self._taking) != before:
            self._scaling.append((now, len(self._taking)))
        heapq.heappush(self._events, (now + autoscaler.rule.interval, -1, 0))

    def _retire(self, replica: Replica, now: float) -> None:
        """Give it no more requests; it ends with its last one."""
        self._taking.remove(replica)
        self._router.remove(str(replica.number))
        replica.draining = True
        if not replica.load:
            self._end(replica, now)

    def _end(self, replica: Replica, now: float) -> None:
        self._usages.append(self._replicas.pop(replica.number).close(now))
        self._begun += replica.begun
