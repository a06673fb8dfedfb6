"""``AccessLog``: every request gets an id, one line when it ends, its trace, and a count if it was refused.

Knows statuses, routes and the timelines of what a request generated; does not know bodies, so it cannot tell them.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.runtime.server.errors import APIError
from qserve.runtime.server.logs import current_request_id, event
from qserve.runtime.server.metrics import REJECTIONS

if TYPE_CHECKING:
    from qserve.runtime.sampling import SamplingParams
    from qserve.runtime.server.engine_thread import Generation
    from qserve.runtime.server.service import Service
    from qserve.runtime.server.timeline import Timeline

logger = logging.getLogger(__name__)

# Asked every few seconds, or part of a page: told at level debug, not traced, not counted.
PROBES = ("/health", "/ready", "/metrics", "/", "/v1/engine", "/v1/engine/events")
HEADER = b"x-request-id"
_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_HASH = re.compile(r"[0-9a-f]{64}")  # of a key that has no name: its start is enough to tell callers apart
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


@dataclass
class Access:
    """One request, from its headers to its end; ``scope["qserve.access"]`` holds it. Times: ``time.monotonic``."""

    request_id: str
    method: str
    traceparent: dict[str, str]
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int | None = None
    route: str = "unmatched"
    tenant: str = ""
    generations: list[Generation] = field(default_factory=list)

    @property
    def timelines(self) -> list[Timeline]:
        return [timeline for generation in self.generations for timeline in generation.timelines]

    @property
    def params(self) -> SamplingParams | None:
        return self.generations[0].params if self.generations else None

    @property
    def prompt_tokens(self) -> int:
        return sum(timeline.prompt_tokens for timeline in self.timelines)

    @property
    def cached_tokens(self) -> int:
        return sum(timeline.cached_tokens for timeline in self.timelines)

    @property
    def output_tokens(self) -> int:
        return sum(sum(timeline.output_tokens.values()) for timeline in self.timelines)

    @property
    def queue_seconds(self) -> float | None:
        """The longest that a prompt of it waited."""
        return max((t.queue_seconds for t in self.timelines if t.queue_seconds is not None), default=None)

    @property
    def ttft_seconds(self) -> float | None:
        """From the request's headers to the first token of any of its choices."""
        first = min((t.first_token for t in self.timelines if t.first_token is not None), default=None)
        return None if first is None else first - self.started

    @property
    def finish_reasons(self) -> list[str]:
        """Each that occurred, once. A choice that was left in the middle counts as ``abort``."""
        return sorted({reason for timeline in self.timelines for reason in timeline.reasons()})


class AccessLog:
    """ASGI middleware, to be the outermost: what an inner one refuses gets its id and its line too."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        access = Access(_request_id(headers.get(HEADER)), scope.get("method", "WEBSOCKET"), _trace_context(headers))
        scope["qserve.access"] = access
        token = current_request_id.set(access.request_id)

        async def named(message: Message) -> None:
            if message["type"] in _STARTS:
                access.status = message.get("status", 101)
                MutableHeaders(scope=message)["X-Request-Id"] = access.request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:  # a defect of this server, not of the request
            if access.status is not None or scope["type"] != "http":
                raise  # the answer has begun: the connection is closed, which ends it
            logger.exception("a request failed")
            await APIError(500, "the server failed on this request; its log says why").response()(scope, receive, named)
        finally:
            self._end(access, scope)
            current_request_id.reset(token)

    def _end(self, access: Access, scope: Scope) -> None:
        access.ended = time.monotonic()
        access.status = access.status or 499  # the client left before there was an answer
        access.route = getattr(scope.get("route"), "path", access.route)
        tenant = scope.get("qserve.tenant", "")
        access.tenant = tenant[:12] if _HASH.fullmatch(tenant) else tenant
        service, probe = self._service, scope["path"] in PROBES or scope["path"].startswith("/static/")
        if not probe and access.status in REJECTIONS:
            draining = access.status == 503 and service.draining
            service.metrics.rejected("draining" if draining else REJECTIONS[access.status])
        if not probe and service.tracer is not None:
            service.tracer.record(access, service.model_name)
        # A full server or a request that was too slow is worth a look; a failure is worth one now.
        level = logging.INFO if access.status < 500 else logging.ERROR if access.status == 500 else logging.WARNING
        event(logger, "request", logging.DEBUG if probe else level, **_line(access, service.model_name))


def _line(access: Access, model: str) -> dict[str, Any]:
    line: dict[str, Any] = {
        "request_id": access.request_id,
        "method": access.method,
        "route": access.route,
        "status": access.status,
        "tenant": access.tenant or None,
        "total_seconds": round(access.ended - access.started, 6),
    }
    if not access.generations:
        return line
    queued, ttft = access.queue_seconds, access.ttft_seconds
    return line | {
        "model": model,
        "prompt_tokens": access.prompt_tokens,
        "cached_tokens": access.cached_tokens,
        "output_tokens": access.output_tokens,
        "queue_seconds": None if queued is None else round(queued, 6),
        "ttft_seconds": None if ttft is None else round(ttft, 6),
        "finish_reason": ",".join(access.finish_reasons),
    }


def _request_id(given: bytes | None) -> str:
    """The client's own, if it is short and printable: it looks for it in its log and in ours."""
    if given is not None and _CLIENT_ID.fullmatch(given):
        return given.decode("ascii")
    return f"req-{secrets.token_hex(12)}"


def _trace_context(headers: dict[bytes, bytes]) -> dict[str, str]:
    """The W3C headers that say which trace this request belongs to."""
    names = (b"traceparent", b"tracestate")
    return {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}
