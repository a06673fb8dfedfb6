"""``Fleet``: the replicas, which of them take requests, and the router among those. Some may be processes of its own,
which it starts when they are wanted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qserve.checkpoint.errors import UsageError
from qserve.runtime.fleet.breaker import Breaker
from qserve.runtime.fleet.local_model import LocalModel
from qserve.runtime.fleet.prompts import BLOCK_TOKENS
from qserve.runtime.fleet.upstream import Lost, Unreachable, Upstream
from qserve.runtime.router import CAPACITY, Placement, Prompt, Router
from qserve.runtime.server.telemetry.logs import event

logger = logging.getLogger(__name__)

PROBE_TIMEOUT = 5.0  # seconds: a machine whose processors are all busy answers late
MISSED = 3  # probes in a row without an answer end what waits for a replica; it gets nothing new after a refused one
LOADING_INTERVAL = 0.1  # seconds between two looks at a process of our own that is not ready
MAX_REPORT = 4 << 20  # bytes of a replica's own pages


@dataclass
class Replica:
    """One server as the router sees it.

    Attributes:
        state: ``ready``, ``draining``, ``loading`` or ``failed``: its own word. ``down`` where it gives none;
            ``unknown`` before it is asked; ``unloaded`` where it is started for the next request.
        held_back: an operator wants it to get no new requests.
        models: its entries of ``/v1/models`` by id, as it gave them last.
        local: its process, where this machine keeps it.
    """

    upstream: Upstream
    state: str = "unknown"
    held_back: bool = False
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    capacity: int = CAPACITY
    breaker: Breaker = field(default_factory=Breaker)
    missed: int = 0
    local: LocalModel | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return self.upstream.url

    def takes_requests(self, now: float) -> bool:
        return self.state == "ready" and not self.held_back and not self.breaker.is_open(now)

    async def until_ready(self) -> None:
        """Return when a process of our own takes requests; it is started if it does not run. Raises ``Unreachable``
        where it cannot be loaded."""
        assert self.local is not None
        while not self.takes_requests(time.monotonic()):
            self.local.want()
            if self.local.failure is not None:
                raise Unreachable(self.local.failure)
            await self._news.wait()

    def tell(self) -> None:
        """Whoever waits looks again."""
        self._news.set()
        self._news = asyncio.Event()

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

    def __init__(
        self, urls: Iterable[str], policy: str, key: str | None, interval: float, local: Sequence[LocalModel] = ()
    ) -> None:
        """``key``: what the replicas are shown; ``interval``: seconds between two probes of each. ``local``: models
        whose processes are kept here, beside the servers at ``urls``; the first is for requests that name none."""
        upstreams = [Upstream(url.rstrip("/"), key) for url in urls]
        self.replicas = {upstream.url: Replica(upstream) for upstream in upstreams}
        self.default_model = local[0].name if local else None
        for model in local:
            entry = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "qserve"}  # for now
            self.replicas[model.url] = Replica(Upstream(model.url), local=model, models={model.name: entry})
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
        found: dict[str, dict[str, Any]] = {}
        for replica in self.replicas.values():
            found |= {name: entry for name, entry in replica.models.items() if name not in found}
        return found

    @property
    def num_ready(self) -> int:
        now = time.monotonic()
        return sum(each.takes_requests(now) for each in self.replicas.values())

    @property
    def is_ready(self) -> bool:
        """Whether a request is answered, if need be after a model was loaded for it."""
        return self.num_ready > 0 or any(each.state == "unloaded" for each in self.replicas.values())

    def place(self, prompt: Prompt, model: str | None, without: Collection[str] = ()) -> Placement | None:
        """The replica for a request; None where none takes it."""
        placement = self.router.place(prompt, model, without)
        if placement is not None and (local := self.replicas[placement.replica].local) is not None:
            local.want()
        return placement

    def loadable(self, model: str | None) -> Replica | None:
        """A process of our own that serves ``model``, or any where that is None, and that may take requests soon."""
        for replica in self.replicas.values():
            if replica.local is not None and not replica.held_back and (model is None or model in replica.models):
                return replica
        return None

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
        """Probe every replica, now and then again, and keep our own processes; does not return. When it is cancelled,
        they end."""
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas.values():
                group.create_task(self._watch(replica))
                if replica.local is not None:
                    group.create_task(self._keep(replica, replica.local))

    async def _keep(self, replica: Replica, local: LocalModel) -> None:
        def became(state: str) -> None:
            replica.breaker, replica.missed = Breaker(), 0  # another process than the one that failed
            self._become(replica, state, local.failure or "")
            self.router.forget(replica.url)
            self._apply(replica)

        await local.run(became, lambda: self.router.load(replica.url))

    async def _watch(self, replica: Replica) -> None:
        while True:
            began = time.monotonic()
            if replica.local is None or replica.local.listens:
                await self._probe(replica)
            loading = replica.local is not None and replica.state != "ready"
            interval = min(LOADING_INTERVAL, self._interval) if loading else self._interval
            await asyncio.sleep(max(0.05, interval - (time.monotonic() - began)))

    async def _probe(self, replica: Replica) -> None:
        try:
            status, body = await replica.get("/ready")
            said = json.loads(body).get("status")
            state = "ready" if status == 200 else said if said in ("loading", "draining") else "failed"
            if state == "ready" and replica.state != "ready":
                await self._introduce(replica)
        except (Unreachable, Lost, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
            if replica.local is not None and not replica.local.listens:  # it ended meanwhile, as is known
                return
            why = str(error) or "it does not answer"
            replica.missed += 1
            if isinstance(error, Unreachable) or replica.missed >= MISSED:
                self._become(replica, "down", why)
            if replica.missed >= MISSED:  # its connections may not say so
                replica.upstream.give_up(f"the replica is down: {why}")
        else:
            if replica.local is not None and not replica.local.listens:
                return
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
        if state == "ready" and replica.local is not None:
            replica.local.loaded()

    def _apply(self, replica: Replica) -> None:
        """Tell the router."""
        if replica.takes_requests(time.monotonic()):
            self.router.add(replica.url, replica.models, replica.capacity)
        else:
            self.router.close(replica.url)
        replica.tell()
