"""``Ingress``: the application of ``qserve route``, and of ``qserve run`` with several models.

A request is read, placed, forwarded, and where nothing of its answer was seen yet, tried again elsewhere. What the
replicas answer passes through as it is. Its own are the probes, ``/metrics``, ``/v1/models``, ``/v1/usage`` and
``/v1/replicas``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.runtime.fleet.aliases import Aliases
from qserve.runtime.fleet.delivery import WHOLE, Delivery
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.fleet.metrics import FleetMetrics
from qserve.runtime.fleet.prompts import prompt_of
from qserve.runtime.fleet.upstream import Answer, Lost, Unreachable
from qserve.runtime.router import LONG_PROMPT, Placement, Prompt
from qserve.runtime.server.batches.runner import BatchRunner
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.errors import APIError, ClientGone, as_api_error
from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.http.body import MAX_COMMAS, MORE_COMMAS, parse_object, read_body
from qserve.runtime.server.http.streaming import HEARTBEAT_SECONDS, while_connected
from qserve.runtime.server.kv_order import KV_HEADER, KvOrder
from qserve.runtime.server.limits.keys import CALLER, ApiKey, KeyRing, caller_header
from qserve.runtime.server.limits.quota import QuotaError, Quotas
from qserve.runtime.server.limits.shared_pool import SharedPool
from qserve.runtime.server.routes.batches import batch_app
from qserve.runtime.server.telemetry.request_record import CACHED_TOKENS, PROMPT_TOKENS, RequestRecord

MAX_LOST = 2  # replicas that may end with a request: one that kills its server must not go round
MAX_AGAIN = 8  # attempts beyond one at each replica
MAX_WAITING = 1024  # requests that wait for a replica to be loaded; more are refused
MAX_LOADING = 900.0  # seconds that they wait: a large model loads for minutes
FORWARDED = ("content-type", "accept", "traceparent", "tracestate", "anthropic-version")  # never a key or a cookie
SESSION = "x-session-id"


@dataclass(frozen=True)
class _Call:
    """A request that was read, ready to be sent as often as it takes."""

    method: str
    target: str
    headers: str
    body: bytes
    prompt: Prompt
    model: str | None
    streamed: bool
    began: float


class Ingress:
    """ASGI application. ``draining`` refuses new requests."""

    def __init__(
        self, fleet: Fleet, config: ServerConfig, keys: KeyRing, batches: BatchRunner | None = None
    ) -> None:
        """``keys``: of the callers. ``batches``: answers files of requests; None keeps none."""
        self.fleet = fleet
        fleet.charge = self._charge
        self._keys = keys
        self.aliases = Aliases({})
        self.metrics = FleetMetrics(fleet)
        self.draining = False
        self._config = config
        self._batches = batch_app(batches)
        self._quotas = Quotas()
        self._uploads = SharedPool(config.max_upload_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket is for one server
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope, receive)
        delivery = Delivery(send, request.url.path)
        try:
            response = await self._own(request)
            if response is not None:
                await response(scope, receive, send)
            else:
                await self._pass_on(request, delivery)
        except ClientGone:
            return
        except Exception as error:
            if delivery.ended:
                raise
            await delivery.fail(as_api_error(error))

    async def _own(self, request: Request) -> ASGIApp | None:
        """What the router answers itself; None for all that replicas answer."""
        path, fleet = request.url.path, self.fleet
        record: RequestRecord = request.scope["qserve.record"]
        # Whoever calls cannot fill the log with other paths.
        record.route = path if path in GET_ROUTES | POST_ROUTES else "other"
        if path.startswith(("/v1/files", "/v1/batches")):
            return self._batches
        _check_route(request.method, path)
        if path in ("/v1/replicas/drain", "/v1/replicas/resume"):
            require_admin(request)
            url = (await self._content(request))[1].get("replica")
            if not isinstance(url, str) or url not in fleet.replicas:
                raise APIError(404, f"there is no replica {url!r:.200}", param="replica")
            fleet.hold_back(url, path.endswith("drain"))
            return JSONResponse(self._replicas())
        if path == "/health":
            return JSONResponse({"status": "ok"})
        if path == "/ready":
            state = "draining" if self.draining else "ready" if fleet.is_ready else "no replica is ready"
            return JSONResponse({"status": state}, 200 if state == "ready" else 503)
        if path == "/metrics":
            require_admin(request)
            text = await self.metrics.render(time.monotonic())
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/v1/replicas":
            require_admin(request)
            return JSONResponse(self._replicas())
        if path == "/v1/usage":
            require_admin(request)
            return JSONResponse(fleet.used.page())
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": list(self._models().values())})
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            self._check_model(name)
            return JSONResponse(self._models()[name])
        return None

    def _replicas(self) -> dict[str, Any]:
        now, fleet = time.monotonic(), self.fleet
        return {
            "object": "list",
            "data": [
                {
                    "id": each.url,
                    "object": "replica",
                    "state": each.state,
                    "held_back": each.held_back,
                    "takes_requests": each.takes_requests(now),
                    "models": list(each.models),
                    "requests": fleet.router.load(each.url),
                }
                for each in fleet.replicas.values()
            ],
        }

    def _models(self) -> dict[str, dict[str, Any]]:
        """The entries of ``/v1/models``: those of the replicas, and the aliases."""
        names = self.aliases.names
        aliases = {name: {"id": name, "object": "model", "created": 0, "owned_by": "qserve"} for name in names}
        return aliases | self.fleet.models

    def _check_model(self, name: str) -> None:
        if name not in self.aliases.names and not self.fleet.serves(name):
            known = " or ".join(map(repr, self._models())) or "none yet"
            raise APIError(
                404, f"model {name!r:.200} is not served here; it is {known}",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def _content(self, request: Request) -> tuple[bytes, dict[str, Any]]:
        config = self._config
        body = await read_body(
            request, self._uploads, max_bytes=config.max_body_bytes, timeout=config.body_timeout
        )
        return body, parse_object(body, MORE_COMMAS + MAX_COMMAS)

    async def _pass_on(self, request: Request, delivery: Delivery) -> None:
        if self.draining:
            raise APIError(503, "the router is shutting down", headers={"Retry-After": "5"})
        key: ApiKey | None = request.scope["qserve.key"]
        body, content = await self._content(request) if request.method == "POST" else (b"", {})
        began = time.perf_counter()
        model = content.get("model")
        if isinstance(model, str):
            self._check_model(model)
        prompt = prompt_of(content, key.name if key else "", request.headers.get(SESSION, ""))
        if isinstance(model, str) and model in self.aliases.names:
            record: RequestRecord = request.scope["qserve.record"]
            model = self.aliases.target(model, prompt.session or record.request_id, self.fleet.ready)
            body = json.dumps(content | {"model": model}).encode()
        call = _Call(
            request.method,
            _target(request),
            self._headers(request, key),
            body,
            prompt,
            model if isinstance(model, str) else self.fleet.default_model,
            content.get("stream") is True,
            began,
        )
        choices = self._reserve(key, content)
        try:
            await while_connected(request, self._send(call, delivery))
        finally:
            if key is not None:
                self._quotas.ended(key, choices)

    def _headers(self, request: Request, key: ApiKey | None) -> str:
        given = [(name, value) for name in FORWARDED if (value := request.headers.get(name))]
        record: RequestRecord = request.scope["qserve.record"]
        given.append(("x-request-id", record.request_id))
        if key is not None:
            given.append((CALLER, caller_header(key)))
        return "".join(f"{name}: {value}\r\n" for name, value in given)

    def _reserve(self, key: ApiKey | None, content: dict[str, Any]) -> int:
        """Count the choices of a request against the limits of its key. Raises ``APIError`` 429 or 403."""
        n, prompts = content.get("n"), content.get("prompt")
        many = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
        choices = (n if type(n) is int and n > 0 else 1) * (len(prompts) if many and prompts else 1)
        if key is None:
            return choices
        try:
            self._quotas.check(key, choices, time.monotonic())
        except QuotaError as error:
            wait = {"Retry-After": str(max(1, round(error.retry_after)))}
            raise APIError(429, str(error), code="rate_limit_exceeded", headers=wait) from None
        self._quotas.began(key, choices)
        return choices

    def _charge(self, caller: str, tokens: int) -> None:
        """A replica has computed so many tokens for the caller of this name, maybe for another router."""
        if (key := self._keys.named(caller)) is not None:
            self._quotas.spend(key, tokens, time.monotonic())

    async def _send(self, call: _Call, delivery: Delivery) -> None:
        """Try replicas until one answers. Raises ``APIError`` where none does."""
        fleet, tried, lost = self.fleet, set[str](), 0
        if prefillers := fleet.prefillers(call.model):
            await self._prefill(call, prefillers)
        error = APIError(503, "no replica takes requests now", code="no_replica", headers={"Retry-After": "5"})
        for _ in range(len(fleet.replicas) + MAX_AGAIN):
            placement = fleet.place(call.prompt, call.model, tried | prefillers)
            placement = placement or fleet.place(call.prompt, call.model, tried)
            if placement is None:
                if not fleet.expects(call.model, tried):
                    break
                await self._until_ready(call, tried, delivery)
                continue
            url = placement.replica
            tried.add(url)
            refused = None
            self.metrics.placed(url, call.prompt.blocks, placement.cached, time.perf_counter() - call.began)
            try:
                refused = await self._attempt(call, placement, delivery)
            except Unreachable as failure:
                fleet.failed(url, str(failure), unreachable=True)
                error = APIError(502, "the replica could not be reached", code="replica_unreachable")
            except Lost as failure:
                fleet.failed(url, str(failure), unreachable=False)
                lost += 1
                error = APIError(502, "the replica ended while it worked on this request", code="replica_lost")
                if delivery.is_visible or lost == MAX_LOST:
                    self.metrics.broken(url)
                    raise error from None
            else:
                if refused is None:
                    return
                error = refused
            finally:
                placement.ended()
            if (known := fleet.replicas.get(url)) is not None and known.local is not None and refused is None:
                tried.discard(url)  # its process is started again
            self.metrics.retried(url)
        raise error

    async def _until_ready(self, call: _Call, tried: Collection[str], delivery: Delivery) -> None:
        """Wait for a replica. Raises ``APIError`` where it cannot be loaded, or too many wait."""
        if self.fleet.held.total() >= MAX_WAITING:
            raise APIError(503, "too many requests wait for a model to be loaded", headers={"Retry-After": "10"})
        loading = asyncio.ensure_future(self.fleet.until_ready(call.model, tried))
        until = time.monotonic() + MAX_LOADING
        try:
            while not loading.done() and time.monotonic() < until:
                await asyncio.wait((loading,), timeout=HEARTBEAT_SECONDS)
                if call.streamed and not loading.done():
                    await delivery.beat()
            if not loading.done():
                raise APIError(503, f"model {call.model!r:.200} was not loaded in {MAX_LOADING:g} s", code="loading")
            loading.result()
        except Unreachable as failure:
            raise APIError(503, f"model {call.model!r:.200} cannot be loaded: {failure}", code="model_failed") from None
        finally:
            loading.cancel()

    async def _prefill(self, call: _Call, prefillers: set[str]) -> None:
        """Let a replica of that role compute a long prompt, from which the one that answers fetches it. Where that
        fails, the latter computes it."""
        fleet = self.fleet
        _, held = fleet.router.holder(call.prompt.digests, fleet.replicas.keys() - prefillers)
        if call.target.partition("?")[0] not in _GENERATING or call.prompt.blocks - held < LONG_PROMPT:
            return
        placement = fleet.place(call.prompt, call.model, fleet.replicas.keys() - prefillers)
        if placement is None:
            return
        upstream = fleet.replicas[placement.replica].upstream
        headers = f"{call.headers}{KV_HEADER}: {KvOrder(prefill=True).header()}\r\n"
        self.metrics.placed(placement.replica, call.prompt.blocks, placement.cached, time.perf_counter() - call.began)
        try:
            answer = await upstream.send(call.method, call.target, headers, call.body)
            try:
                await answer.whole(WHOLE)
            finally:
                upstream.release(answer)
            if answer.status == 200:
                placement.started()
            else:
                placement.refused()
        except (Unreachable, Lost) as failure:
            placement.refused()
            fleet.failed(placement.replica, str(failure), unreachable=isinstance(failure, Unreachable))
        finally:
            placement.ended()

    async def _attempt(self, call: _Call, placement: Placement, delivery: Delivery) -> APIError | None:
        """Forward to one replica. An error where it is full or about to end, and another may take the request."""
        replica = self.fleet.replicas[placement.replica]
        order = self.fleet.kv_order(placement, call.prompt, call.model)
        headers = call.headers if order is None else f"{call.headers}{KV_HEADER}: {order.header()}\r\n"
        try:
            answer = await replica.upstream.send(call.method, call.target, headers, call.body)
        except (Unreachable, Lost):
            placement.refused()
            raise
        try:
            if answer.status == 503:
                placement.refused()
                return await _busy(answer)
            if answer.status == 401:
                placement.refused()
                raise Unreachable("it does not take the router's key")
            if answer.status < 400:
                placement.started(_cached_share(answer))
                self.fleet.worked(replica, call.model)
            else:
                placement.refused()
            await delivery.forward(answer)
            return None
        finally:
            replica.upstream.release(answer)


_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
GET_ROUTES = frozenset(("/health", "/ready", "/metrics", "/openapi.json", "/v1/models", "/v1/replicas", "/v1/usage"))
FORWARDED_ROUTES = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
     "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank", "/v2/rerank", "/classify", "/score", "/rerank",
     "/tokenize", "/detokenize", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
)  # fmt: skip
"""What replicas answer, all by POST. Nothing else is passed on: it would be with the router's own key."""
POST_ROUTES = FORWARDED_ROUTES | {"/v1/replicas/drain", "/v1/replicas/resume"}


def _check_route(method: str, path: str) -> None:
    """Raises ``APIError`` 404 or 405."""
    allowed = "GET" if path in GET_ROUTES or path.startswith("/v1/models/") else "POST" if path in POST_ROUTES else None
    if allowed is None:
        raise APIError(404, f"there is no route {method} {path[:200]}")
    if method != allowed and not (method == "HEAD" and allowed == "GET"):
        raise APIError(405, f"the method is not allowed: {method} {path[:200]}", headers={"Allow": allowed})


def _target(request: Request) -> str:
    """As the client wrote it: a path that is decoded may hold the end of a line."""
    path: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return (path + (b"?" + query if query else b"")).decode("latin-1")


async def _busy(answer: Answer) -> APIError:
    """What a replica says that is full, loads or drains."""
    body = await answer.whole(1 << 16)
    try:
        error = parse_object(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (APIError, LookupError, TypeError, AttributeError):
        message, code = "the replica takes no requests", None
    headers = {"Retry-After": wait} if (wait := answer.headers.get("retry-after")) else None
    return APIError(503, message, code=code if isinstance(code, str) else None, headers=headers)


def _cached_share(answer: Answer) -> float | None:
    """The part of its prompt that a replica had cached, where it says so."""
    prompt, cached = answer.headers.get(PROMPT_TOKENS.lower(), ""), answer.headers.get(CACHED_TOKENS.lower(), "")
    return int(cached) / int(prompt) if prompt.isdecimal() and cached.isdecimal() and int(prompt) else None
