"""``AccessLog``: every request gets an id, a line when it ends, its trace, and a count if it was refused.

It never sees a body, so none of its lines can hold a prompt or an answer.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.runtime.server.errors import as_api_error
from qserve.runtime.server.telemetry.logs import current_request_id, event
from qserve.runtime.server.telemetry.metrics import REJECTIONS
from qserve.runtime.server.telemetry.request_record import RequestRecord
from qserve.runtime.server.telemetry.tracing import Tracer

logger = logging.getLogger(__name__)

# Called every few seconds, or part of a page: logged at level debug, not traced, not counted.
PROBES = ("/health", "/ready", "/metrics", "/", "/v1/engine", "/v1/engine/events")
HEADER = b"x-request-id"
_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_HASH = re.compile(r"[0-9a-f]{64}")  # the name of a key without one: its beginning is enough to tell callers apart
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class RejectionCounter(Protocol):
    def rejected(self, reason: str) -> None: ...


class AccessLog:
    """Reports requests: a line and a trace for each, and a count of those that were refused."""

    def __init__(
        self, model: str, metrics: RejectionCounter, tracer: Tracer | None, draining: Callable[[], bool]
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._tracer = tracer
        self._draining = draining

    @contextlib.contextmanager
    def request(self, method: str, headers: Mapping[bytes, bytes]) -> Iterator[RequestRecord]:
        """The record of one request. It is reported when the block ends; log lines within the block have its id."""
        record = RequestRecord(_request_id(headers.get(HEADER)), method, _trace_context(headers))
        token = current_request_id.set(record.request_id)
        try:
            yield record
        finally:
            self._end(record)
            current_request_id.reset(token)

    def _end(self, record: RequestRecord) -> None:
        record.ended = time.monotonic()
        record.status = record.status or 499  # the client left before there was an answer
        if not record.is_probe and record.status in REJECTIONS:
            draining = record.status == 503 and self._draining()
            self._metrics.rejected("draining" if draining else REJECTIONS[record.status])
        if not record.is_probe and self._tracer is not None:
            self._tracer.record(record, self._model)
        # A full server or a request that was too slow is worth a look; a failure is worth one now.
        level = logging.INFO if record.status < 500 else logging.ERROR if record.status == 500 else logging.WARNING
        event(logger, "request", logging.DEBUG if record.is_probe else level, **_line(record, self._model))


class AccessLogMiddleware:
    """ASGI middleware. It goes outside all that may refuse, so that refused requests get an id and a line too."""

    def __init__(self, app: ASGIApp, log: AccessLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        with self._log.request(scope.get("method", "WEBSOCKET"), dict(scope["headers"])) as record:
            scope["qserve.record"] = record
            try:
                await self._answer(record, scope, receive, send)
            finally:
                record.route = getattr(scope.get("route"), "path", record.route)
                record.tenant = scope.get("qserve.tenant", "")
                record.is_probe = scope["path"] in PROBES or scope["path"].startswith("/static/")

    async def _answer(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] in _STARTS:
                record.status = message.get("status", 101)
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:  # a defect of this server, not of the request
            if record.status is not None or scope["type"] != "http":
                raise  # the answer has begun: closing the connection ends it
            await as_api_error(error).response(scope["path"])(scope, receive, named)


def _line(record: RequestRecord, model: str) -> dict[str, Any]:
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "tenant": _caller(record.tenant),
        "total_seconds": round(record.ended - record.started, 6),
    }
    if not record.generations:
        return line
    queued, ttft = record.queue_seconds, record.ttft_seconds
    return line | {
        "model": model,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "queue_seconds": None if queued is None else round(queued, 6),
        "ttft_seconds": None if ttft is None else round(ttft, 6),
        "finish_reason": ",".join(record.finish_reasons),
    }


def _caller(tenant: str) -> str | None:
    return (tenant[:12] if _HASH.fullmatch(tenant) else tenant) or None


def _request_id(given: bytes | None) -> str:
    """The client's own id, if it is short and printable, so that it can be found in both logs; otherwise a new one."""
    if given is not None and _CLIENT_ID.fullmatch(given):
        return given.decode("ascii")
    return f"req-{secrets.token_hex(12)}"


def _trace_context(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The W3C headers that say which trace this request belongs to."""
    names = (b"traceparent", b"tracestate")
    return {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}
