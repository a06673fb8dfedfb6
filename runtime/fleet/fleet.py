"""``Fleet``: the replicas, which of them take requests, and the router among those."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from qserve.checkpoint.errors import UsageError
from qserve.runtime.fleet.breaker import Breaker
from qserve.runtime.fleet.prompts import BLOCK_TOKENS
from qserve.runtime.fleet.upstream import Lost, Unreachable, Upstream
from qserve.runtime.router import CAPACITY, Placement, Prompt, Router
from qserve.runtime.server.telemetry.logs import event

logger = logging.getLogger(__name__)

PROBE_TIMEOUT = 5.0  # seconds: a machine whose processors are all busy answers late
MISSED = 3  # probes in a row without an answer end what waits for a replica; it gets nothing new after a refused one
MAX_REPORT = 4 << 20  # bytes of a replica's own pages


@dataclass
class Replica:
    """One server as the router sees it.

    Attributes:
        state: ``ready``, ``draining``, ``loading`` or ``failed``: its own word. ``down`` where it gives none;
            ``unknown`` before it is asked.
        held_back: an operator wants it to get no new requests.
        models: its entries of ``/v1/models`` by id, as it gave them last.
    """

    upstream: Upstream
    state: str = "unknown"
    held_back: bool = False
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    capacity: int = CAPACITY
    breaker: Breaker = field(default_factory=Breaker)
    missed: int = 0

    @property
    def url(self) -> str:
        return self.upstream.url

    def takes_requests(self, now: float) -> bool:
        return self.state == "ready" and not self.held_back and not self.breaker.is_open(now)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Raises ``Unreachable``, ``Lost`` or ``TimeoutError``."""
        async with asyncio.timeout(PROBE_TIMEOUT):
            answer = await self.upstream.send("GET", path)
            try:
                return answer.status, await answer.whole(MAX_REPORT)
            finally:
                self.upstream.release(answer)


class Fleet:
    """All of its methods belong to one event loop. Raises ``UsageError`` for a URL that is none or comes twice."""

    def __init__(self, urls: Iterable[str], policy: str, key: str | None, interval: float) -> None:
        """``key``: what the replicas are shown; ``interval``: seconds between two probes of each."""
        upstreams = [Upstream(url.rstrip("/"), key) for url in urls]
        self.replicas = {upstream.url: Replica(upstream) for upstream in upstreams}
        if len(self.replicas) < len(upstreams):
            raise UsageError("a replica is given twice")
        self.router = Router(policy)
        for url in self.replicas:
            self.router.add(url)
            self.router.close(url)
        self._interval = interval

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Every entry of ``/v1/models`` that a replica has shown, those of replicas that are down too."""
        return {name: entry for each in reversed(self.replicas.values()) for name, entry in each.models.items()}

    @property
    def num_ready(self) -> int:
        now = time.monotonic()
        return sum(each.takes_requests(now) for each in self.replicas.values())

    def place(self, prompt: Prompt, model: str | None, without: Collection[str] = ()) -> Placement | None:
        """The replica for a request; None where none takes it."""
        return self.router.place(prompt, model, without)

    def hold_back(self, url: str, held_back: bool) -> None:
        """Let a replica get no new requests, or let it again. Raises ``KeyError``."""
        replica = self.replicas[url]
        replica.held_back = held_back
        event(logger, "replica held back" if held_back else "replica resumed", replica=url)
        self._apply(replica)

    def failed(self, url: str, why: str, *, unreachable: bool) -> None:
        """A request found the replica so. One that cannot be reached waits for its next good probe."""
        replica = self.replicas[url]
        replica.breaker.failed(time.monotonic())
        if unreachable:
            self._become(replica, "down", why)
        self._apply(replica)

    def worked(self, url: str) -> None:
        self.replicas[url].breaker.worked()

    async def watch(self) -> None:
        """Probe every replica, now and then again; does not return."""
        await asyncio.gather(*(self._watch(replica) for replica in self.replicas.values()))

    async def _watch(self, replica: Replica) -> None:
        while True:
            began = time.monotonic()
            await self._probe(replica)
            await asyncio.sleep(max(0.05, self._interval - (time.monotonic() - began)))

    async def _probe(self, replica: Replica) -> None:
        try:
            status, body = await replica.get("/ready")
            said = json.loads(body).get("status")
            state = "ready" if status == 200 else said if said in ("loading", "draining") else "failed"
            if state == "ready" and replica.state != "ready":
                await self._introduce(replica)
        except (Unreachable, Lost, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = str(error) or "it does not answer"
            replica.missed += 1
            if isinstance(error, Unreachable) or replica.missed >= MISSED:
                self._become(replica, "down", why)
            if replica.missed >= MISSED:  # its connections may not say so
                replica.upstream.give_up(f"the replica is down: {why}")
        else:
            replica.missed = 0
            self._become(replica, state, "")
        self._apply(replica)

    async def _introduce(self, replica: Replica) -> None:
        """Learn what it serves, and how many blocks it can keep."""
        status, body = await replica.get("/v1/models")
        if status != 200:
            raise Lost(f"/v1/models answers {status}: is the key of the replicas right?")
        replica.models = {entry["id"]: entry for entry in json.loads(body)["data"]}
        status, body = await replica.get("/v1/engine")
        if status == 200:
            cache = json.loads(body)["kv"]
            replica.capacity = cache["total"] * cache["block_size"] // BLOCK_TOKENS

    def _become(self, replica: Replica, state: str, why: str) -> None:
        if state == replica.state:
            return
        level = logging.WARNING if state in ("down", "failed") else logging.INFO
        event(logger, "replica", level, replica=replica.url, state=state, reason=why or None)
        replica.state = state
        if state == "down":
            self.router.forget(replica.url)

    def _apply(self, replica: Replica) -> None:
        """Tell the router."""
        if replica.takes_requests(time.monotonic()):
            self.router.add(replica.url, replica.models, replica.capacity)
        else:
            self.router.close(replica.url)
