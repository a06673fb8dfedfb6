"""``Router``: which replica a request goes to, by its model, by what is cached where, and by loads.

Knows replicas by name, digests of prompt blocks, and requests that have not ended. Does not know tokens, text, clocks
or connections, so that the fleet and the simulator route by this very file.

What a replica holds is a prediction: blocks of the prompts that went there, the least recently used forgotten first.
The replica corrects it: by its capacity, by what it found in its cache for a request, and by its restart.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

POLICIES = ("prefix-aware", "least-loaded", "round-robin")
OVERLOAD = 1.25  # times the average number of requests, and no replica has more
CALM = 4  # requests that any replica may have: with so few no bound is worth a prompt that is computed again
PREFILL = 8  # cost of a block to be computed, where a block of a live request costs 1; at 1 busy replicas lose affinity
CAPACITY = 1 << 14  # blocks that a replica holds if it does not say


@dataclass(frozen=True, slots=True)
class Prompt:
    """What routing needs to know of a request.

    Attributes:
        digests: of the leading full blocks, as ``digests.chain_digests`` makes them.
        blocks: of the whole prompt, at least as many.
        session: requests of one session go to one replica where nothing better is known; empty for none.
    """

    digests: Sequence[bytes] = ()
    blocks: int = 0
    session: str = ""


@dataclass(slots=True)
class _Replica:
    name: str
    models: frozenset[str]
    capacity: int
    is_open: bool = True
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the next to be forgotten first
    live: dict[int, Placement] = field(default_factory=dict)  # by identity
    active: int = 0  # blocks of live requests, without those that were cached for them
    waiting: int = 0  # those of them whose prompts are not computed yet

    @property
    def load(self) -> int:
        return len(self.live)

    def num_cached(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks it is believed to hold."""
        for count, digest in enumerate(digests):
            if digest not in self.held:
                return count
        return len(digests)

    def hold(self, digests: Sequence[bytes]) -> None:
        """A chain is useless without its beginning, so its end is forgotten first."""
        for digest in reversed(digests):
            self.held[digest] = None
            self.held.move_to_end(digest)
        self.shrink(self.capacity)

    def shrink(self, count: int) -> None:
        while len(self.held) > count:
            self.held.popitem(last=False)


@dataclass(slots=True, eq=False)
class Placement:
    """A request at its replica, from ``Router.place`` until ``ended`` or ``refused``; later calls do nothing.

    ``cached``: leading blocks that the replica was believed to hold.
    """

    replica: str
    cached: int
    _prompt: Prompt = field(repr=False)
    _at: _Replica = field(repr=False)
    _computed: bool = False

    @property
    def _own(self) -> int:
        return self._prompt.blocks - self.cached

    def started(self, cached_share: float | None = None) -> None:
        """Its prompt is computed. ``cached_share``: the part of the prompt that the replica found in its cache, 0 to 1.

        If that is less than half of what was expected, the replica has evicted more than was believed: the older half
        of the prediction is forgotten.
        """
        if self._computed or id(self) not in self._at.live:
            return
        self._computed = True
        self._at.waiting -= self._own
        if cached_share is not None and 2 * cached_share * self._prompt.blocks < self.cached:
            self._at.shrink(max(len(self._at.held) // 2, len(self._prompt.digests)))

    def ended(self) -> None:
        if self._at.live.pop(id(self), None) is not None:
            self._at.active -= self._own
            self._at.waiting -= 0 if self._computed else self._own

    def refused(self) -> None:
        """The replica did not compute its prompt, so it does not hold what that would have added."""
        if id(self) in self._at.live:
            for digest in self._prompt.digests[self.cached :]:
                self._at.held.pop(digest, None)
            self.ended()


class Router:
    """Places requests on the replicas that were added. All of its methods are for one thread.

    ``policy``: ``prefix-aware`` takes the least cost: blocks of the prompt that the replica does not hold, blocks of
    prompts that wait there, and, at an eighth, blocks of live requests (Dynamo's router adds up such). At equal cost
    the fewest requests count, then the highest random weight (Thaler and Ravishankar, 1998) of the session or of the
    prompt's first block: a replica that comes or goes moves only what is its own, and two routers agree. A session goes
    by that weight alone where no replica holds anything of the prompt. No replica has more than 1.25 times the average
    number of requests (Mirrokni et al., "Consistent Hashing with Bounded Loads", 2018). ``least-loaded`` takes the
    replica with the fewest requests, the first of several, and ``round-robin`` each in its turn.

    Raises ``ValueError`` for an unknown policy.
    """

    def __init__(self, policy: str = "prefix-aware") -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown routing {policy!r}: choose from {', '.join(POLICIES)}")
        self.policy = policy
        self._replicas: dict[str, _Replica] = {}
        self._turn = 0

    def add(self, name: str, models: Collection[str] = (), capacity: int = CAPACITY) -> None:
        """A replica that takes requests, or what is new of one that is known. ``capacity``: blocks of its cache."""
        replica = self._replicas.setdefault(name, _Replica(name, frozenset(), capacity))
        replica.models, replica.capacity, replica.is_open = frozenset(models), max(1, capacity), True
        replica.shrink(replica.capacity)

    def remove(self, name: str) -> None:
        """It gets no more requests. Those that it has may end as they do."""
        del self._replicas[name]

    def close(self, name: str) -> None:
        """It gets no more requests until ``add`` is called again; what it holds stays known."""
        self._replicas[name].is_open = False

    def forget(self, name: str) -> None:
        """It has started again, and holds nothing."""
        self._replicas[name].held.clear()

    def load(self, name: str) -> int:
        """Its requests that have not ended."""
        return self._replicas[name].load

    def place(self, prompt: Prompt, model: str | None = None, without: Collection[str] = ()) -> Placement | None:
        """Choose for a request one of the open replicas that serve ``model``, None for any. None where there is none.

        ``without``: replicas that are out of the question, as those that have failed it.
        """
        found = [
            each
            for each in self._replicas.values()
            if each.is_open and (model is None or model in each.models) and each.name not in without
        ]
        if not found:
            return None
        if self.policy == "round-robin":
            self._turn += 1
            chosen = found[(self._turn - 1) % len(found)]
        elif self.policy == "least-loaded":
            chosen = min(found, key=_load)
        else:
            chosen = _cheapest(prompt, found)
        placement = Placement(chosen.name, chosen.num_cached(prompt.digests), prompt, chosen)
        chosen.live[id(placement)] = placement
        chosen.active += placement._own
        chosen.waiting += placement._own
        chosen.hold(prompt.digests)
        return placement

    def check(self) -> None:
        """Raise ``AssertionError`` where the sums differ from what they are sums of."""
        for replica in self._replicas.values():
            live = replica.live.values()
            assert all(each._at is replica and each.replica == replica.name for each in live)
            assert all(0 <= each.cached <= len(each._prompt.digests) <= each._prompt.blocks for each in live)
            assert replica.active == sum(each._own for each in live)
            assert replica.waiting == sum(each._own for each in live if not each._computed)
            assert len(replica.held) <= replica.capacity


def _load(replica: _Replica) -> int:
    return replica.load


def _cheapest(prompt: Prompt, replicas: Sequence[_Replica]) -> _Replica:
    most = max(CALM, math.ceil(OVERLOAD * (sum(map(_load, replicas)) + 1) / len(replicas)))
    allowed = [each for each in replicas if each.load < most]
    cached = [each.num_cached(prompt.digests) for each in allowed]
    key = prompt.session.encode("utf-8", "surrogatepass") or (prompt.digests[0] if prompt.digests else b"")
    if not (prompt.session and not any(cached)):
        costs = [
            (PREFILL * (prompt.blocks - count + each.waiting) + each.active, each.load)
            for each, count in zip(allowed, cached)
        ]
        least = min(costs)
        allowed = [each for each, cost in zip(allowed, costs) if cost == least]
    return allowed[0] if len(allowed) == 1 else max(allowed, key=lambda each: _weight(key, each.name))


@lru_cache(maxsize=1 << 16)
def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(key, digest_size=8, salt=hashlib.blake2b(name.encode(), digest_size=16).digest()).digest()
