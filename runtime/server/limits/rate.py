"""``ServiceRate``: how fast the server works, and so how long its backlog will take.

Knows counts and times that it is given, in seconds; does not know requests or threads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW = 60  # seconds that are looked back upon


@dataclass
class _Second:
    number: int
    tokens: int = 0
    finished: int = 0
    outputs: int = 0  # tokens of those finished


class ServiceRate:
    """Tokens of the last minute, prompt and output alike, in bins of a second."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._seconds: deque[_Second] = deque(maxlen=WINDOW)

    def computed(self, tokens: int, now: float) -> None:
        self._bin(now).tokens += tokens

    def finished(self, output_tokens: int, now: float) -> None:
        second = self._bin(now)
        second.finished += 1
        second.outputs += output_tokens

    def backlog_seconds(self, requests: int, prompt_tokens: int, now: float) -> float:
        """Until what waits is done: its prompts and, for each, an answer as long as the last minute's were.

        0 where nothing was measured yet.
        """
        recent = [second for second in self._seconds if now - second.number < WINDOW]
        tokens = sum(second.tokens for second in recent)
        if not tokens:
            return 0.0
        answer = sum(second.outputs for second in recent) / max(1, sum(second.finished for second in recent))
        span = max(1.0, min(WINDOW, now - self._started))
        return (prompt_tokens + requests * answer) * span / tokens

    def _bin(self, now: float) -> _Second:
        if not self._seconds or self._seconds[-1].number != int(now):
            self._seconds.append(_Second(int(now)))
        return self._seconds[-1]
