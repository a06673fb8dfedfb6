"""``Upstream``: requests to one replica over connections that are kept, and ``Answer``: a response while it comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from urllib.parse import urlsplit

from qserve.checkpoint.errors import UsageError
from qserve.runtime.fleet.http_client import HttpExchange

CONNECT_TIMEOUT = 5.0
MAX_UNREAD = 256 << 10  # bytes of a response whose client reads slowly; then its replica has to wait
MAX_IDLE = 256  # connections that are kept


class Unreachable(Exception):
    """There is no connection to the replica; nothing was sent."""


class Lost(Exception):
    """The replica ended or does not answer any more; it may have worked on the request."""


class Answer(HttpExchange):
    """One connection with the response that comes over it."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._unread = 0
        self._ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def ask(self, request: bytes) -> None:
        """Send a request and return when the head of its response is there. Raises ``Lost``."""
        self._parts, self._unread, self._ended, self._error = [], 0, False, None
        self._news.clear()
        self.begin(request)
        while not self.headers_came:
            await self._wait()

    @property
    def headers_came(self) -> bool:
        return self.status >= 200 and self._state != "head"

    async def next(self) -> bytes:
        """All of the body that came since the last call, in one piece; empty at its end. Raises ``Lost``."""
        while not self._parts:
            if self._ended:
                return b""
            await self._wait()
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._unread > MAX_UNREAD and self.is_open and self.transport is not None:
            self.transport.resume_reading()
        self._unread = 0
        return content

    async def whole(self, most: int) -> bytes:
        """The whole body. Raises ``Lost``, also where it has more than ``most`` bytes."""
        body = bytearray()
        while content := await self.next():
            body += content
            if len(body) > most:
                raise Lost(f"the answer has more than {most:,} bytes")
        return bytes(body)

    def give_up(self, why: str) -> None:
        """End it as if the replica had ended."""
        self._fail(ConnectionResetError(why))

    async def _wait(self) -> None:
        if self._error is not None:
            raise Lost(str(self._error))
        await self._news.wait()
        self._news.clear()

    def head(self) -> None:
        self._news.set()

    def part(self, content: bytes) -> None:
        self._parts.append(content)
        before, self._unread = self._unread, self._unread + len(content)
        if before <= MAX_UNREAD < self._unread and self.transport is not None:
            self.transport.pause_reading()
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._news.set()


class Upstream:
    """A replica at ``url``: ``http://host:port``, ``https://host`` or ``unix:PATH``. Raises ``UsageError``."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """``key``: is shown to the replica with every request."""
        self.url = url
        self.key = key
        parts = urlsplit(url)
        self._path = parts.path if parts.scheme == "unix" else None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        try:
            self._host, port = parts.hostname or "", parts.port
        except ValueError:
            self._host, port = "", None
        if self._path is None and (
            parts.scheme not in ("http", "https") or not self._host or parts.path.strip("/") or parts.username
        ):
            raise UsageError(f"a replica is http://HOST:PORT, https://HOST or unix:PATH, not {url!r:.200}")
        self._port = port or (443 if self._tls else 80)
        bearer = "" if key is None else f"Authorization: Bearer {key}\r\n"
        self._head = f"Host: {parts.netloc or 'localhost'}\r\nAccept-Encoding: identity\r\n{bearer}"
        self._idle: list[Answer] = []
        self._busy: set[Answer] = set()

    async def send(self, method: str, target: str, headers: str = "", body: bytes = b"") -> Answer:
        """Send a request; returns when the head of the response is there. ``headers``: lines that end with CR LF.

        Every answer goes to ``release`` in the end. Raises ``Unreachable`` or ``Lost``.
        """
        length = f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
        request = f"{method} {target} HTTP/1.1\r\n{self._head}{headers}{length}\r\n".encode("latin-1") + body
        lost: Lost | None = None
        while self._idle and lost is None:
            answer = self._idle.pop()
            if answer.is_open:
                try:
                    return await self._ask(answer, request)
                except Lost as error:  # it may have been closed for its idleness: a new connection tells
                    lost = error
        try:
            answer = await self._connect()
        except Unreachable:
            if lost is not None:
                raise lost from None
            raise
        return await self._ask(answer, request)

    def release(self, answer: Answer) -> None:
        """The connection goes back to be used again, or is ended where its response is not complete."""
        self._busy.discard(answer)
        if answer.is_idle and answer.reusable and answer.is_open and len(self._idle) < MAX_IDLE:
            self._idle.append(answer)
        elif answer.transport is not None:
            answer.transport.abort()

    def give_up(self, why: str) -> None:
        """End every exchange: the replica is gone, although its connections may not say so."""
        for answer in [*self._busy]:
            answer.give_up(why)
        self.close()

    def close(self) -> None:
        for answer in self._idle:
            if answer.transport is not None:
                answer.transport.close()
        self._idle.clear()

    async def _ask(self, answer: Answer, request: bytes) -> Answer:
        self._busy.add(answer)
        try:
            await answer.ask(request)
        except BaseException:
            self.release(answer)
            raise
        return answer

    async def _connect(self) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if self._path is not None:
                    _, answer = await loop.create_unix_connection(Answer, self._path)
                else:
                    transport, answer = await loop.create_connection(Answer, self._host, self._port, ssl=self._tls)
                    with contextlib.suppress(OSError):
                        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except TimeoutError:
            raise Unreachable(f"no connection within {CONNECT_TIMEOUT:g} s") from None
        except (OSError, UnicodeError) as error:
            raise Unreachable(getattr(error, "strerror", None) or str(error)) from None
        return answer
