"""``Breaker``: a replica that fails again and again gets no requests for a while. It reads no clock."""

from __future__ import annotations

from collections import deque

FAILURES = 5  # within ``WINDOW`` seconds open it
WINDOW = 30.0
PAUSE = 10.0  # seconds without requests; after them one more failure is enough


class Breaker:
    """Counts the failures of one replica. Times are seconds."""

    def __init__(self) -> None:
        self._failures: deque[float] = deque(maxlen=FAILURES)  # of its process
        self._deaths: deque[float] = deque(maxlen=FAILURES)
        self._until = float("-inf")

    def failed(self, now: float) -> None:
        self._count(self._failures, now)

    def died(self, now: float) -> None:
        """Its process ended, and all that failed with it failed once. Whoever comes in its place may work."""
        self._failures.clear()
        self._until = float("-inf")
        self._count(self._deaths, now)

    def worked(self) -> None:
        self._failures.clear()
        self._deaths.clear()

    def _count(self, times: deque[float], now: float) -> None:
        times.append(now)
        if len(times) == FAILURES and now - times[0] <= WINDOW + PAUSE:
            self._until = now + PAUSE

    def is_open(self, now: float) -> bool:
        return now < self._until
