"""``HttpExchange``: HTTP/1.1 from the client's side, one exchange at a time, without a layer between socket and user.

Responses are read as RFC 9112 frames them. What becomes of a body is for the class that is derived from it.
"""

from __future__ import annotations

import asyncio

MAX_HEAD = 1 << 16


class BadResponse(Exception):
    """The answer is no HTTP response, or one that cannot be read."""


class HttpExchange(asyncio.Protocol):
    """``asyncio.Protocol`` of a connection that ``loop.create_connection`` opens. ``begin`` sends a request; then
    ``head``, ``part`` and ``end`` or ``failed`` are called in order. ``status`` and ``headers`` (names in lower case)
    are those of the response.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self._buffer = bytearray()
        self._left: int | None = None  # bytes of the body or chunk; None where the end of the connection ends it
        self._state = "idle"

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def is_idle(self) -> bool:
        return self._state == "idle"

    def begin(self, request: bytes) -> None:
        assert self.transport is not None and self._state == "idle"
        self.status, self.reusable, self._state = 0, False, "head"
        self.transport.write(request)

    def head(self) -> None:
        """The status and the headers are there."""

    def part(self, content: bytes) -> None:
        """Some of the body, as it came."""

    def end(self) -> None:
        """The response is complete."""

    def failed(self, error: Exception) -> None:
        """It never will be: ``ConnectionError`` where the connection ended too early, or ``BadResponse``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state == "rest" and exc is None:
            self._finish()
        elif self._state != "idle":
            self._fail(ConnectionResetError("the connection ended within the response"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while self._advance():
                pass
        except (BadResponse, ValueError, IndexError) as error:
            self._fail(BadResponse(str(error)))

    def _advance(self) -> bool:
        """Read one part of the received data; False where it is not there as a whole."""
        buffer = self._buffer
        match self._state:
            case "head":
                end = buffer.find(b"\r\n\r\n")
                if end < 0:
                    if len(buffer) > MAX_HEAD:
                        raise BadResponse("the head of the response has no end")
                    return False
                text = bytes(buffer[:end]).decode("latin-1")
                del buffer[: end + 4]
                self._read_head(text)
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
                content = bytes(buffer[: self._left])  # all of it, if the end is not known
                if not content and self._left != 0:
                    return False
                del buffer[: len(content)]
                if self._left is not None:
                    self._left -= len(content)
                if content:
                    self.part(content)
                if self._left == 0:
                    if self._state == "length":
                        self._finish()
                    else:
                        self._state = "gap"
            case _:
                return False
        return True

    def _read_head(self, text: str) -> None:
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
        elif self.status in (204, 304):
            self._left, self._state = 0, "length"
        else:
            self._left, self._state, self.reusable = None, "rest", False
        self.head()

    def _finish(self) -> None:
        self._state = "idle"
        self.end()

    def _fail(self, error: Exception) -> None:
        if self._state == "failed":
            return
        self._state = "failed"
        if self.transport is not None:
            self.transport.abort()
        self.failed(error)
