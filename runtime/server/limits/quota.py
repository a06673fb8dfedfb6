"""``Quotas``: what each API key has running, waiting and spent, and whether it may have more.

It reads no clock: times are given, in seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qserve.runtime.server.limits.keys import ApiKey
from qserve.runtime.server.limits.usage import Usage


class QuotaError(Exception):
    """A key is at one of its limits; after ``retry_after`` seconds it should be below."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass
class _Bucket:
    """Tokens spent and not yet refilled, as of ``time``. They are counted as they are computed, so the running requests
    of a key may overdraw it; the next request then waits longer."""

    spent: float
    time: float

    def at(self, now: float, per_minute: int) -> float:
        return max(0.0, self.spent - (now - self.time) * per_minute / 60)


class Quotas:
    """The counts of all keys, by name. A key without limits is counted too: a reload may give it some.

    ``used``: all that ``max_tokens_per_minute`` counts, since the start.
    """

    def __init__(self) -> None:
        self.used = Usage()
        self._active: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    def check(self, key: ApiKey, choices: int, now: float, wait: float = 1.0) -> None:
        """Raise ``QuotaError`` where the key may not have so many more choices; ``wait``: seconds until one may end."""
        limit, active = key.max_requests, self._active[key.name]
        if limit is not None and active + choices > limit:
            raise QuotaError(
                f"this API key may have {limit} requests at once (each choice of each prompt counts); {active} are "
                f"running or waiting and {choices} more were asked for",
                wait,
            )
        per_minute = key.max_tokens_per_minute
        if per_minute is not None and (bucket := self._buckets.get(key.name)):
            spent = bucket.at(now, per_minute)
            if spent >= per_minute:
                raise QuotaError(
                    f"this API key has used its {per_minute} tokens per minute", (spent - per_minute) * 60 / per_minute
                )

    def began(self, key: ApiKey, choices: int) -> None:
        self._active[key.name] += choices

    def ended(self, key: ApiKey, choices: int) -> None:
        self._active[key.name] -= choices
        if not self._active[key.name]:
            del self._active[key.name]

    def spend(self, key: ApiKey, tokens: int, now: float) -> None:
        self.used.add(key.name, tokens)
        if key.max_tokens_per_minute is not None:
            bucket = self._buckets.setdefault(key.name, _Bucket(0.0, now))
            bucket.spent, bucket.time = bucket.at(now, key.max_tokens_per_minute) + tokens, now
