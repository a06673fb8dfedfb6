"""``Connection``: one HTTP/1.1 connection, with the time at which each server-sent event came.

It does in one callback what general clients do in many layers, so that at a thousand tokens a second the load generator
itself is not measured. Responses are read as RFC 9112 frames them; connections are direct, without a proxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

Event = Callable[[bytes, float], None]
"""Takes the data of one event (https://html.spec.whatwg.org/multipage/server-sent-events.html) and when it came."""

MAX_HEAD = 1 << 16
MAX_BODY = 1 << 24  # bytes that are kept: a body that is no stream, or one line of a stream


class BadResponse(Exception):
    """The answer is no HTTP response, or one that cannot be read."""


class Connection(asyncio.Protocol):
    """One exchange at a time. ``asyncio.Protocol`` of a connection that ``loop.create_connection`` opens."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()  # of a response that is no stream of events
        self._buffer = bytearray()
        self._text = bytearray()  # decoded, not yet a whole line
        self._left: int | None = None  # bytes of the body or chunk; None where the end of the connection ends it
        self._state = "idle"
        self._event: Event | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def exchange(self, request: bytes, event: Event) -> None:
        """Send a request and follow the response to its end.

        ``status`` and ``headers`` hold its head; events go to ``event``, and any other body to ``body``. Raises
        ``ConnectionError`` where the connection ends too early, and ``BadResponse``.
        """
        assert self.transport is not None and self._state == "idle"
        self.status, self.reusable, self._state, self._event = 0, False, "head", event
        self.body.clear()
        self._text.clear()
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._done
        finally:
            self._done = None
            if self._state != "idle":
                self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state == "rest" and exc is None:
            self._finish()
        else:
            self._fail(ConnectionResetError("the connection ended within the response"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        try:
            while self._advance(now):
                pass
        except (BadResponse, ValueError, IndexError) as error:
            self._fail(BadResponse(str(error)))

    def _advance(self, now: float) -> bool:
        """Read one part of the received data; False where it is not there as a whole."""
        buffer = self._buffer
        match self._state:
            case "head":
                end = buffer.find(b"\r\n\r\n")
                if end < 0:
                    if len(buffer) > MAX_HEAD:
                        raise BadResponse("the head of the response has no end")
                    return False
                self._head(bytes(buffer[:end]).decode("latin-1"))
                del buffer[: end + 4]
            case "size":
                end = buffer.find(b"\r\n")
                if end < 0:
                    return False
                self._left = int(buffer[:end].split(b";")[0], 16)
                del buffer[: end + 2]
                self._state = "chunk" if self._left else "trailer"
            case "trailer":
                end = buffer.find(b"\r\n")
                if end < 0:
                    return False
                del buffer[: end + 2]
                if end == 0:
                    self._finish()
            case "gap":
                if len(buffer) < 2:
                    return False
                del buffer[:2]
                self._state = "size"
            case "chunk" | "length" | "rest":
                part = bytes(buffer[: self._left])  # all of it, if the end is not known
                if not part and self._left != 0:
                    return False
                del buffer[: len(part)]
                if self._left is not None:
                    self._left -= len(part)
                self._content(part, now)
                if self._left == 0:
                    if self._state == "length":
                        self._finish()
                    else:
                        self._state = "gap"
            case _:
                return False
        return True

    def _head(self, text: str) -> None:
        first, *lines = text.split("\r\n")
        version, status = first.split()[:2]
        self.status = int(status)
        if not version.startswith("HTTP/1.") or not 100 <= self.status <= 599:
            raise BadResponse("the server does not speak HTTP/1.1")
        if self.status < 200:  # an interim response; the real one follows
            return
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.reusable = version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._state = "size"
        elif "content-length" in self.headers:
            self._left, self._state = int(self.headers["content-length"]), "length"
        else:
            self._left, self._state, self.reusable = None, "rest", False

    def _content(self, part: bytes, now: float) -> None:
        if "event-stream" not in self.headers.get("content-type", ""):
            self.body += part
            if len(self.body) > MAX_BODY:
                raise BadResponse("the body of the response has no end")
            return
        assert self._event is not None
        text = self._text
        text += part
        if len(text) > MAX_BODY:
            raise BadResponse("a line of the stream has no end")
        if b"\n" not in part:
            return
        *lines, rest = text.split(b"\n")
        self._text = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._event(bytes(line[5:].strip()), now)

    def _finish(self) -> None:
        self._state = "idle"
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
