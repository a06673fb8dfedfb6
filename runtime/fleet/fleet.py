"""``Fleet``: the replicas, which of them take requests, and the router among those.

Some are given at the start and stay. Some may be processes of its own, which it starts when they are wanted. Others
join by themselves, say so again and again, and leave when they are down.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qserve.checkpoint.errors import UsageError
from qserve.runtime.fleet.breaker import Breaker
from qserve.runtime.fleet.local_model import LocalModel
from qserve.runtime.fleet.prompts import BLOCK_TOKENS
from qserve.runtime.fleet.upstream import Lost, Unreachable, Upstream
from qserve.runtime.router import CAPACITY, WORTH_FETCHING, Placement, Prompt, Router
from qserve.runtime.server.kv_order import KvOrder, ticket
from qserve.runtime.server.limits.usage import Usage
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
        joined: it came by itself.
        models: its entries of ``/v1/models`` by id, as it gave them last.
        follower: reads what it says that its cache holds.
        reports: whether it may say what its cache holds; ``follower`` reads that.
        local: its process, where this machine keeps it.
        waiting: requests in its queue, of a replica that joined.
        used: tokens of each caller, as it told them last, from ``since`` on; None before it did.
    """

    upstream: Upstream
    joined: bool = False
    waiting: int = 0
    state: str = "unknown"
    held_back: bool = False
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    capacity: int = CAPACITY
    breaker: Breaker = field(default_factory=Breaker)
    missed: int = 0
    reports: bool = True
    follower: asyncio.Task[None] | None = None
    local: LocalModel | None = None
    used: dict[str, int] | None = None
    since: float = 0.0

    @property
    def url(self) -> str:
        return self.upstream.url

    def serves(self, model: str | None) -> bool:
        return model is None or model in self.models

    def kv_identity(self, model: str | None) -> str | None:
        """With whom it may exchange KV blocks of a model; None for nobody."""
        entry = self.models.get(model) if model is not None else next(iter(self.models.values()), None)
        found = entry.get("qserve") if entry else None
        return found.get("kv_transfer") if isinstance(found, dict) else None

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
        self.prefill: dict[str, int] = {}  # of a model, how many replicas only compute prompts, for the others
        self.held: Counter[str | None] = Counter()  # requests that wait for a replica to be loaded, by their model
        self.begun: Counter[str] = Counter()  # requests whose answers have begun, by their model
        self.used = Usage()  # what replicas computed
        self.charge: Callable[[str, int], None] = lambda caller, tokens: None  # is told of them, too
        self._interval = interval
        self._promised: dict[str, dict[str, Any]] = {}
        self._news = asyncio.Event()  # there was something to tell the router
        self._watching: dict[str, asyncio.Task[None]] = {}

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Every entry of ``/v1/models`` that a replica has shown, those of replicas that are down too."""
        found: dict[str, dict[str, Any]] = {}
        for replica in self.replicas.values():
            found |= {name: entry for name, entry in replica.models.items() if name not in found}
        return self._promised | found

    @property
    def num_ready(self) -> int:
        now = time.monotonic()
        return sum(each.takes_requests(now) for each in self.replicas.values())

    @property
    def is_ready(self) -> bool:
        """Whether a request is answered, if need be after a model was loaded for it."""
        return self.num_ready > 0 or any(each.state == "unloaded" for each in self.replicas.values())

    def serves(self, model: str) -> bool:
        """Whether ``model`` is one of ``models``."""
        return model in self._promised or any(model in each.models for each in self.replicas.values())

    def ready(self, model: str | None) -> list[Replica]:
        """Those that take requests for a model, or for any where that is None."""
        now = time.monotonic()
        return [each for each in self.replicas.values() if each.serves(model) and each.takes_requests(now)]

    def promise(self, models: Iterable[str]) -> None:
        """Replicas of these models join by themselves, so requests for them wait while there is none. The first is
        for requests that name none."""
        self._promised = {
            name: self._promised.get(name, {"id": name, "object": "model", "created": 0, "owned_by": "qserve"})
            for name in models
        }
        self.default_model = next(iter(self._promised), None)

    def expects(self, model: str | None, tried: Collection[str]) -> bool:
        """Whether a request that found no replica but those ``tried`` may wait for one."""
        replica = self._loadable(model)
        return replica.url not in tried if replica is not None else model in self._promised and not tried

    async def until_ready(self, model: str | None, tried: Collection[str]) -> None:
        """Return when one takes requests that was not ``tried``; a process of our own is started for that. Raises
        ``Unreachable`` where it cannot be loaded."""
        self.held[model] += 1
        try:
            while all(each.url in tried for each in self.ready(model)):
                if (replica := self._loadable(model)) is not None and replica.local is not None:
                    replica.local.want()
                    if replica.local.failure is not None:
                        raise Unreachable(replica.local.failure)
                await self._news.wait()
        finally:
            self.held[model] -= 1

    async def join(self, url: str, key: str | None) -> None:
        """A replica says that it is there. One that is new is asked at once; it leaves when it is down."""
        if (known := self.replicas.get(url)) is not None:
            if known.upstream.key == key:
                return
            self._leave(known)  # another process has its address now
        replica = self.replicas[url] = Replica(Upstream(url, key), joined=True)
        self.router.add(url)
        self.router.close(url)
        event(logger, "replica joined", replica=url)
        await self._probe(replica)
        if self.replicas.get(url) is replica:
            self._watching[url] = asyncio.create_task(self._watch(replica))

    def _leave(self, replica: Replica) -> None:
        event(logger, "replica left", replica=replica.url)
        if replica.follower is not None:
            replica.follower.cancel()
        del self.replicas[replica.url]
        self.router.remove(replica.url)

    def place(self, prompt: Prompt, model: str | None, without: Collection[str] = ()) -> Placement | None:
        """The replica for a request; None where none takes it."""
        placement = self.router.place(prompt, model, without)
        if placement is not None and (local := self.replicas[placement.replica].local) is not None:
            local.want()
        return placement

    def prefillers(self, model: str | None) -> set[str]:
        """The replicas of a model that compute prompts for the others; none where no other takes requests."""
        count = self.prefill.get(model or "", 0)
        ready = sorted(each.url for each in self.ready(model)) if count else []
        return {*ready[:count]} if len(ready) > count else set()

    def kv_order(self, placement: Placement, prompt: Prompt, model: str | None) -> KvOrder | None:
        """Where the replica of a placement may get more of the prompt than it holds; None for nowhere."""
        chosen = self.replicas[placement.replica]
        if (identity := chosen.kv_identity(model)) is None:
            return None
        others = [
            each.url
            for each in self.replicas.values()
            if each is not chosen and each.upstream.key and each.state in ("ready", "draining")
            and each.kv_identity(model) == identity
        ]  # fmt: skip
        url, count = self.router.holder(prompt.digests, others)
        if count - placement.cached < WORTH_FETCHING:
            return None
        return KvOrder(url, ticket(self.replicas[url].upstream.key or "", time.time()))

    def _loadable(self, model: str | None) -> Replica | None:
        """A process of our own that may take requests for ``model`` soon."""
        for replica in self.replicas.values():
            if replica.local is not None and not replica.held_back and replica.serves(model):
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
        if (replica := self.replicas.get(url)) is None:
            return  # it left meanwhile
        if replica.state != "down":
            replica.breaker.failed(time.monotonic())
        if unreachable:
            self._become(replica, "down", why)
        self._apply(replica)

    def worked(self, replica: Replica, model: str | None) -> None:
        """It answers a request for ``model``; None for a replica that has one model alone."""
        replica.breaker.worked()
        if name := model or next(iter(replica.models), None):
            self.begun[name] += 1

    async def watch(self) -> None:
        """Probe every replica, now and then again, and keep our own processes; does not return. When it is cancelled,
        they end."""
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas.values():
                    if not replica.joined:
                        group.create_task(self._watch(replica))
                    if replica.local is not None:
                        group.create_task(self._keep(replica, replica.local))
                await asyncio.Event().wait()
        finally:
            followers = [each.follower for each in self.replicas.values() if each.follower is not None]
            for task in (*self._watching.values(), *followers):
                task.cancel()

    async def _keep(self, replica: Replica, local: LocalModel) -> None:
        def became(state: str) -> None:
            replica.breaker, replica.missed = Breaker(), 0  # another process than the one that failed
            self._become(replica, state, local.failure or "")
            self.router.forget(replica.url)
            self._apply(replica)

        await local.run(became, lambda: self.router.load(replica.url))

    async def _watch(self, replica: Replica) -> None:
        while self.replicas.get(replica.url) is replica:
            began = time.monotonic()
            if replica.local is None or replica.local.listens:
                await self._probe(replica)
            loading = replica.local is not None and replica.state != "ready"
            interval = min(LOADING_INTERVAL, self._interval) if loading else self._interval
            await asyncio.sleep(max(0.05, interval - (time.monotonic() - began)))
        if self._watching.get(replica.url) is asyncio.current_task():
            del self._watching[replica.url]

    async def _probe(self, replica: Replica) -> None:
        try:
            status, body = await replica.get("/ready")
            said = json.loads(body).get("status")
            state = "ready" if status == 200 else said if said in ("loading", "draining") else "failed"
            if state == "ready" and replica.state != "ready":
                await self._introduce(replica)
            elif state == "ready" and replica.joined:
                await self._look(replica)
            if state == "ready":
                await self._look_at_usage(replica)
        except (Unreachable, Lost, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
            if replica.local is not None and not replica.local.listens:  # it ended meanwhile, as is known
                return
            why = str(error) or "it does not answer"
            replica.missed += 1
            if isinstance(error, Unreachable) or replica.missed >= MISSED:
                self._become(replica, "down", why)
            if replica.missed >= MISSED:  # its connections may not say so
                replica.upstream.give_up(f"the replica is down: {why}")
                if replica.joined and self.replicas.get(replica.url) is replica:
                    self._leave(replica)
                    return
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
        self._promised |= {name: entry for name, entry in replica.models.items() if name in self._promised}
        await self._look(replica)

    async def _look(self, replica: Replica) -> None:
        """Learn how many blocks it can keep, and how many requests wait there."""
        status, body = await replica.get("/v1/engine")
        if status == 200:
            engine = json.loads(body)
            replica.capacity = engine["kv"]["total"] * engine["kv"]["block_size"] // BLOCK_TOKENS
            replica.waiting = engine.get("num_waiting", 0)

    async def _look_at_usage(self, replica: Replica) -> None:
        status, body = await replica.get("/v1/usage")
        if status == 200:
            page = json.loads(body)
            self.count(replica, {each["caller"]: int(each["tokens"]) for each in page["data"]}, float(page["since"]))

    def count(self, replica: Replica, used: dict[str, int], since: float) -> None:
        """A replica has computed so many tokens for each caller since its start, at ``since``. What it had computed
        before it first told so, it computed for other routers."""
        before = used if replica.used is None else replica.used if since == replica.since else {}
        replica.used, replica.since = used, since
        for caller, tokens in used.items():
            known = before.get(caller, 0)
            more = tokens - known if tokens >= known else tokens  # less: it had forgotten the caller
            if more:
                self.used.add(caller, more)
                self.charge(caller, more)

    async def _follow(self, replica: Replica) -> None:
        """Let the router know what the replica says that its cache holds; a server that does not say is guessed at."""
        try:
            answer = await replica.upstream.send("GET", "/v1/prefixes/events")
            try:
                replica.reports = answer.status not in (403, 404)
                rest = b""
                while answer.status == 200 and (content := await answer.next()):
                    *lines, rest = (rest + content).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            self._report(replica, json.loads(line.removeprefix(b"data: ")))
            finally:
                replica.upstream.release(answer)
        except (Unreachable, Lost, ValueError, LookupError, TypeError):
            pass  # a probe tells why, and asks again
        finally:
            if self.replicas.get(replica.url) is replica:
                self.router.guess(replica.url)

    def _report(self, replica: Replica, report: dict[str, Any]) -> None:
        if self.replicas.get(replica.url) is replica and "held" in report:
            held, gone = ([bytes.fromhex(each) for each in report[name]] for name in ("held", "gone"))
            self.router.report(replica.url, held, gone, whole=report["whole"])

    def _become(self, replica: Replica, state: str, why: str) -> None:
        if state == replica.state:
            return
        level = logging.WARNING if state in ("down", "failed") else logging.INFO
        event(logger, "replica", level, replica=replica.url, state=state, reason=why or None)
        replica.state = state
        if state == "down":
            self.router.forget(replica.url)
            replica.reports = True  # another server may come in its place
            replica.breaker.died(time.monotonic())
        if state == "ready" and replica.local is not None:
            replica.local.loaded()

    def _apply(self, replica: Replica) -> None:
        """Tell the router."""
        if self.replicas.get(replica.url) is not replica:
            return  # it left meanwhile
        idle = replica.follower is None or replica.follower.done()
        if replica.state == "ready" and idle and replica.reports and self.router.policy == "prefix-aware":
            replica.follower = asyncio.create_task(self._follow(replica))
        if replica.takes_requests(time.monotonic()):
            self.router.add(replica.url, replica.models, replica.capacity)
        else:
            self.router.close(replica.url)
        self._news.set()  # whoever waits looks again
        self._news.clear()
