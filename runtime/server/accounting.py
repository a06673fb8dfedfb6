"""``Account``: reports what one request costs to the metrics, the quota of its key and the rate of the server."""

from __future__ import annotations

import time

from qserve.runtime.client.generation import Observer
from qserve.runtime.client.timeline import Timeline
from qserve.runtime.output import RequestOutput
from qserve.runtime.server.limits.keys import ApiKey
from qserve.runtime.server.limits.quota import Quotas
from qserve.runtime.server.limits.rate import ServiceRate
from qserve.runtime.server.telemetry.metrics import Metrics


class Accounting:
    """The counters of a whole server."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.quotas = Quotas()
        self.rate = ServiceRate(time.monotonic())

    def open(self, key: ApiKey | None, choices: int, wait: float) -> Account:
        """The account of a request about to be submitted. Raises ``QuotaError``; ``wait`` as in ``Quotas.check``."""
        if key is not None:
            self.quotas.check(key, choices, time.monotonic(), wait)
            self.quotas.began(key, choices)
        return Account(self, key)


class Account(Observer):
    def __init__(self, accounting: Accounting, key: ApiKey | None) -> None:
        self._metrics, self._quotas, self._rate = accounting.metrics, accounting.quotas, accounting.rate
        self._key = key

    def output(self, timeline: Timeline, output: RequestOutput, now: float) -> None:
        self._metrics.observe(timeline, output, now)
        tokens = len(output.token_ids)
        first = output.output_tokens == tokens and output.error is None  # an embedding has no token at all
        prefilled = output.prompt_tokens - output.cached_tokens if first else 0
        if self._key is not None:  # the prompt was paid for at the door, but not what a choice computed of it once more
            self._quotas.spend(self._key, tokens + (prefilled if output.index else 0), now)
        self._rate.computed(tokens + prefilled, now)
        if output.finish_reason is not None:
            self._rate.finished(output.output_tokens, now)
            self.refused(1)

    def dropped(self, choices: int, reason: str) -> None:
        self._metrics.ended(reason)
        self.refused(choices)

    def refused(self, choices: int) -> None:
        if self._key is not None:
            self._quotas.ended(self._key, choices)
