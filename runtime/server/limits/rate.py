"""``ServiceRate``: how fast the server works, and so how long its backlog will take.

It reads no clock: times are given, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW = 60  # seconds that count


@dataclass
class _Second:
    number: int
    tokens: int = 0
    finished: int = 0
    outputs: int = 0  # tokens of the finished ones


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
        """Seconds until the waiting requests are done: their prompts, and answers of the last minute's mean length.

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
