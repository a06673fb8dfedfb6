"""``Delivery``: the answer of one request as its client gets it, whichever replicas it comes from.

What a client has seen cannot be taken back. Until then the request can go to another replica. Comments of an event
stream, which only keep a connection alive, are nothing that a client sees.
"""

from __future__ import annotations

import json
import re

from starlette.types import Send

from qserve.runtime.fleet.upstream import Answer
from qserve.runtime.server.errors import APIError

WHOLE = 1 << 20  # bytes: an answer that is no stream and not larger is sent when it is complete
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server", "x-request-id", "content-length"}
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_COMMENTS = re.compile(rb"(?::[^\n]*[\r\n]+)+")


class Delivery:
    """``is_visible``: the client has seen a part of an answer, so that no other may follow."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._begun = False  # the head of an event stream is sent
        self.is_visible = False
        self.ended = False

    async def forward(self, answer: Answer) -> None:
        """Send what a replica answers, as it comes. Raises ``Lost``."""
        if "event-stream" in answer.headers.get("content-type", ""):
            await self._forward_events(answer)
        else:
            await self._forward_body(answer)
        self.ended = True

    async def fail(self, error: APIError) -> None:
        """End with an error: as an answer or, in a stream, as its last event. Raises ``ConnectionError`` where half of
        a body is sent, for then the end of the connection has to say it."""
        self.ended = True
        if self.is_visible and not self._begun:
            raise ConnectionResetError(str(error))
        if self._begun:
            await self._error_event(error.body(self._path))
        else:
            response = error.response(self._path)
            await self._head(response.status_code, response.raw_headers)
            await self._send({"type": "http.response.body", "body": response.body})

    async def beat(self) -> None:
        """Tell the client of an event stream that it has to wait still: proxies end connections that are silent."""
        if not self._begun:
            self._begun = True
            await self._head(200, _STREAM)
        await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})

    async def _forward_events(self, answer: Answer) -> None:
        """Whole events only: half of one would make an error of the replica unreadable."""
        if not self._begun:
            self._begun = True
            await self._head(answer.status, _headers(answer))
        rest = b""
        while content := await answer.next():
            rest += content
            end = max(rest.rfind(b"\n\n") + 2, rest.rfind(b"\r\n\r\n") + 4)
            if end < 4:
                continue
            events, rest = rest[:end], rest[end:]
            self.is_visible = self.is_visible or not _COMMENTS.fullmatch(events)
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        await self._send({"type": "http.response.body", "body": rest})

    async def _forward_body(self, answer: Answer) -> None:
        body = bytearray()
        while content := await answer.next():
            body += content
            if len(body) > WHOLE and not self._begun:
                if not self.is_visible:
                    self.is_visible = True
                    await self._head(answer.status, _headers(answer))
                await self._send({"type": "http.response.body", "body": bytes(body), "more_body": True})
                body.clear()
        if self._begun:  # a stream of comments before, from a replica that is lost; the next one refuses
            await self._error_event(_json(bytes(body), answer.status))
            return
        if not self.is_visible:
            self.is_visible = True
            await self._head(answer.status, [*_headers(answer), (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": bytes(body)})

    async def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _error_event(self, content: object) -> None:
        name = "event: error\n" if isinstance(content, dict) and "type" in content else ""
        await self._send({"type": "http.response.body", "body": f"{name}data: {json.dumps(content)}\n\n".encode()})


def _headers(answer: Answer) -> list[tuple[bytes, bytes]]:
    return [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in answer.headers.items()
        if name not in _HOP_BY_HOP
    ]


def _json(body: bytes, status: int) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return APIError(502, f"the replica answered {status}").body()
