"""``FairShares``: how much service each tenant had, so that the one with the least goes next.

A virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024): every tenant has a counter of
the tokens it was served, divided by its weight. Among tenants with waiting work, the lowest counter is served next. Two
tenants that always have work thus get equal (weighted) service, whatever either asks for.

It also counts each tenant's requests, and its places among those that run. Knows tenants by name and tokens as numbers;
does not know queues, blocks or clocks.
"""

from __future__ import annotations

from collections import Counter

OUTPUT_COST = 2.0  # cost of an output token: it takes a sequence's turn in a whole step, unlike a prompt token
PRIORITY_TOKENS = 1000.0  # between tenants, one level of priority weighs as much as this many served tokens
REMEMBERED = 16  # credits: until the others were served this much, a tenant that left is expected back


class FairShares:
    """The counters of the tenants that have requests. Not thread-safe.

    ``credit``: tokens that a tenant may be served ahead of the others after it had nothing to do.
    """

    def __init__(self, credit: float) -> None:
        self._credit = credit
        self._served: dict[str, float] = {}
        self._requests: Counter[str] = Counter()
        self._priorities: dict[str, int] = {}  # of the newest request
        self._total = 0.0  # served to all
        self._left: dict[str, float] = {}  # the total at the time a tenant left that is expected back
        self._places: Counter[str] = Counter()  # of those that run

    @property
    def num_tenants(self) -> int:
        """Tenants that have requests."""
        return len(self._requests)

    def join(self, tenant: str, priority: int = 0) -> None:
        """One more request. A tenant that had none is lifted to the least served of the others, less the credit.

        Other service that it left unused while it had nothing to do is lost: it cannot be saved up and then spent at
        once. The credit lets the prompt of a light user through in one piece, where strict turns would double the time
        to its first token.
        """
        if tenant not in self._requests:
            self._left.pop(tenant, None)
            least = min((self._served[other] for other in self._requests), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least - self._credit)
        self._requests[tenant] += 1
        self._priorities[tenant] = priority

    def leave(self, tenant: str) -> None:
        """One request less. When no tenant is left all counters begin anew."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            self._left[tenant] = self._total
        if not self._requests:
            self._served.clear()
            self._priorities.clear()
            self._left.clear()

    def take_place(self, tenant: str) -> None:
        """One more of its requests runs."""
        self._places[tenant] += 1

    def give_place(self, tenant: str) -> None:
        """One less of its requests runs."""
        self._places[tenant] -= 1
        if not self._places[tenant]:
            del self._places[tenant]

    def places(self, tenant: str) -> int:
        """How many of its requests run."""
        return self._places[tenant]

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int, weight: float) -> None:
        """Count service to a tenant that has requests; ``weight`` 2 makes it count half."""
        service = prompt_tokens + OUTPUT_COST * output_tokens
        self._served[tenant] += service / weight
        self._total += service

    def is_ahead(self, tenant: str) -> bool:
        """Whether a tenant that has requests was served more than some other that has requests or is expected back. A
        level of priority weighs as in ``score``.

        A tenant that asks for little mostly has nothing here. Its next request arrives during a step that others fill,
        so they decide how long it waits.
        """
        if self._left:
            gone = self._total - REMEMBERED * self._credit
            self._left = {other: total for other, total in self._left.items() if total > gone}
        mine = self.score(tenant, self._priorities[tenant])
        others = (*self._requests, *self._left)
        return any(self.score(other, self._priorities[other]) < mine for other in others)

    def score(self, tenant: str, priority: int) -> float:
        """The lowest goes first. Bounded priorities only shift counters that grow, so they delay but never starve."""
        return self._served[tenant] + PRIORITY_TOKENS * priority

    def check(self, requests: Counter[str], places: Counter[str]) -> None:
        """Raise ``AssertionError`` unless ``requests``, by tenant, are those that joined and did not leave, and
        ``places`` those that run."""
        assert self._requests == requests, f"{self._requests} is not {requests}"
        assert self._places == places, f"{self._places} is not {places}"
        assert self._requests.keys() <= self._served.keys()
        assert not self._left.keys() & self._requests.keys()
        assert self._left.keys() <= self._served.keys() == self._priorities.keys()
