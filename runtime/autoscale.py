"""``Autoscaler``: how many replicas a model should have, by its queue, by the rate that was measured, and by its SLO.

It reads no clock and starts nothing, so that the fleet and the simulator scale by this very file.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError

RATE_WINDOW = 30.0  # seconds over which the rate is measured
HEADROOM = 0.8  # of the rate that a replica was seen to reach at most, planned for
GROWTH = 2  # times as many replicas at most by one decision: the next one sees what they do


@dataclass(frozen=True)
class Autoscale:
    """The rule. Raises ``UsageError``.

    Attributes:
        min_replicas, max_replicas: never less, never more; at least 0 and 1.
        queue: waiting requests per replica above which another one is started.
        ttft: the objective for the time to first token in seconds: the queue must be over by then at the measured rate.
        target_ongoing_requests: requests per replica, running and waiting, above which another one is started.
        cooldown: seconds. The most that was needed within them is kept.
        interval: seconds between two decisions.
        spare_replicas: ready for a burst, beyond those that the load needs; none of them while there is no load.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    queue: float = 4.0
    ttft: float = math.inf
    target_ongoing_requests: float = math.inf
    cooldown: float = 120.0
    interval: float = 5.0
    spare_replicas: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise UsageError(
                "max_replicas must be at least 1 and not below min_replicas, which is at least 0: not "
                f"{self.min_replicas} to {self.max_replicas}"
            )
        for name in ("queue", "cooldown", "spare_replicas"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise UsageError(f"{name} must be at least 0, not {value}")
        for name in ("ttft", "target_ongoing_requests", "interval"):
            if not (value := getattr(self, name)) > 0:
                raise UsageError(f"{name} must be above 0, not {value}")


@dataclass(frozen=True, slots=True)
class Load:
    """What a model's replicas have to do now.

    Attributes:
        ready: replicas that take requests.
        starting: those that are asked for and do not take any yet.
        ongoing: requests that have not ended, those that wait for a replica too.
        waiting: those of them whose prompts nobody computes.
        begun: requests whose answers have begun, since the start.
    """

    ready: int
    starting: int
    ongoing: int
    waiting: int
    begun: int


def needed(load: Load, rate: float, capacity: float, rule: Autoscale) -> int:
    """How many replicas the load needs now, within the limits of the rule.

    ``rate``: requests begun per second; ``capacity``: those that one replica begins at most, 0 where nobody knows.
    """
    count = load.ready + load.starting
    found = math.ceil(load.ongoing / rule.target_ongoing_requests)
    if load.ongoing:
        found = max(found, 1)
    if load.waiting > rule.queue * count:
        found = max(found, count + 1)
    if load.waiting and rate:
        found = max(found, math.ceil(load.ready * load.waiting / (rate * rule.ttft)))
    if capacity:
        found = max(found, math.ceil(rate / (HEADROOM * capacity)))
    found = min(found, GROWTH * max(count, 1))
    return min(max(found + rule.spare_replicas if found else 0, rule.min_replicas), rule.max_replicas)


class Autoscaler:
    """Decides for one model. Times are seconds of any clock that does not go back."""

    def __init__(self, rule: Autoscale) -> None:
        self.rule = rule
        self._needs: deque[tuple[float, int]] = deque()  # (time, replicas that were needed)
        self._begun: deque[tuple[float, int]] = deque()  # (time, requests begun until then)
        self._capacity = 0.0

    def decide(self, now: float, load: Load) -> int:
        """The number of replicas that there should be: the most that was needed within the cooldown."""
        if not self._needs:  # nobody knows what those that are there were needed for
            self._needs.append((now, min(load.ready + load.starting, self.rule.max_replicas)))
        rate = self._rate(now, load.begun)
        if load.ready and load.waiting > self.rule.queue * load.ready:  # all are busy, so this is what they can do
            self._capacity = max(rate / load.ready, 0.9 * self._capacity)
        self._needs.append((now, needed(load, rate, self._capacity, self.rule)))
        while self._needs[0][0] < now - self.rule.cooldown:
            self._needs.popleft()
        return max(count for _, count in self._needs)

    def _rate(self, now: float, begun: int) -> float:
        """Requests begun per second over the last ``RATE_WINDOW`` seconds."""
        self._begun.append((now, begun))
        while self._begun[0][0] < now - RATE_WINDOW and len(self._begun) > 2:
            self._begun.popleft()
        time, before = self._begun[0]
        return (begun - before) / (now - time) if now > time else 0.0
