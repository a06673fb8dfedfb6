"""``Backlog``: how many requests and prompt tokens wait for their first step, by tenant, and who may add to them.

Knows counts and limits; does not know requests, order or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from qserve.runtime.sampling import RequestError


class QueueFullError(RequestError):
    """The waiting queue is full. Nothing is wrong with the request: it may be sent again later."""


class Backlog:
    """A queue's counts, bounded by requests and by tokens. Not thread-safe; reading it from another thread is harmless.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @classmethod
    def of(cls, max_requests: int, max_tokens: int, counts: Mapping[str, tuple[int, int]]) -> Backlog:
        """A backlog with the ``counts`` of another."""
        backlog = cls(max_requests, max_tokens)
        for tenant, (requests, tokens) in counts.items():
            backlog.add(tenant, tokens, requests)
        return backlog

    def counts(self) -> dict[str, tuple[int, int]]:
        """The number of requests and prompt tokens of each tenant."""
        return {tenant: (requests, self._tokens[tenant]) for tenant, requests in self._requests.items()}

    @property
    def requests(self) -> int:
        return self._requests.total()

    @property
    def tokens(self) -> int:
        """Prompt tokens; choices that share a prompt count it once."""
        return self._tokens.total()

    def add(self, tenant: str, tokens: int, requests: int = 1) -> None:
        self._requests[tenant] += requests
        self._tokens[tenant] += tokens

    def remove(self, tenant: str, tokens: int, requests: int = 1) -> None:
        self._requests[tenant] -= requests
        self._tokens[tenant] -= tokens
        if not self._requests[tenant]:
            del self._requests[tenant], self._tokens[tenant]

    def has_room(self, tenant: str, choices: int, tokens: int, arriving: Backlog | None = None) -> bool:
        """Whether a prompt of ``tokens`` tokens with ``choices`` choices may wait, behind those that are ``arriving``.

        In a full queue a tenant may still have an equal share, so that the backlog of others does not lock it out.
        With k tenants no more than 1 + 1/2 + ... + 1/k times the limits can wait then. Where no prompt token waits, one
        prompt of any length may.
        """
        # Copies are made in one piece; during a loop in Python another thread could change the original.
        requests, all_tokens = self._requests.copy(), self._tokens.copy()
        if arriving is not None:
            requests, all_tokens = requests + arriving._requests, all_tokens + arriving._tokens
        parts = len(requests.keys() | {tenant})
        waiting = all_tokens.total()
        return all(
            not more or total + more <= limit or (parts > 1 and own + more <= limit // parts)
            for total, own, more, limit in (
                (requests.total(), requests[tenant], choices, self.max_requests),
                (waiting, all_tokens[tenant], tokens if waiting else 0, self.max_tokens),
            )
        )

    def require_room(self, tenant: str, choices: int, tokens: int, arriving: Backlog | None = None) -> None:
        """Raise ``QueueFullError`` where there is no room."""
        if not self.has_room(tenant, choices, tokens, arriving):
            raise QueueFullError(
                f"{self.requests} requests are waiting with {self.tokens} prompt tokens, the limit; try again later"
            )

    def check(self, requests: Counter[str], tokens: Counter[str]) -> None:
        """Raise ``AssertionError`` unless these are the counts, by tenant."""
        assert self._requests == requests and self._tokens == tokens, f"the backlog {self._requests} is miscounted"
