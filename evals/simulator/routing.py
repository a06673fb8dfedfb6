"""``Router``: which replica a request goes to, by loads and prefixes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from qserve.checkpoint.errors import UsageError
from qserve.evals.simulator.replica import Replica
from qserve.evals.simulator.traffic import Arrival

OVERLOAD = 1.25


class Router(Protocol):
    def pick(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        """One of ``replicas``: those that take requests, at least one, in order of their numbers."""
        ...


class RoundRobin:
    """Each in its turn."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        self._turn += 1
        return replicas[(self._turn - 1) % len(replicas)]


class LeastLoaded:
    """The replica with the fewest requests that have not ended; of several the first."""

    def pick(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=_load)


class PrefixAffine:
    """Requests of one prefix go to one replica, which has the prefix in its cache.

    The replica is the prefix's highest random weight (Thaler and Ravishankar, 1998), so a replica that comes or goes
    moves only its own prefixes. If that one has more than 1.25 times the average load, the next in weight takes the
    request (Mirrokni et al., "Consistent Hashing with Bounded Loads", 2018). Without a prefix: the least loaded.
    """

    def pick(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        if not arrival.prefix:
            return min(replicas, key=_load)
        most = math.ceil(OVERLOAD * (sum(map(_load, replicas)) + 1) / len(replicas))
        allowed = [replica for replica in replicas if replica.load < most]
        return max(allowed, key=lambda replica: _weight(arrival.prefix, replica.number))


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affine": PrefixAffine,
}


def router(name: str) -> Router:
    """The router called ``name``. Raises ``UsageError`` for an unknown name."""
    if name not in ROUTERS:
        raise UsageError(f"unknown routing {name!r}: choose from {', '.join(ROUTERS)}")
    return ROUTERS[name]()


def _load(replica: Replica) -> int:
    return replica.load


@lru_cache(maxsize=1 << 16)
def _weight(prefix: int, number: int) -> bytes:
    return hashlib.blake2b(b"%d %d" % (prefix, number), digest_size=8).digest()
