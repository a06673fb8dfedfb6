"""``Connection``: one HTTP/1.1 connection, with the time at which each server-sent event came.

It does in one callback what general clients do in many layers, so that at a thousand tokens a second the load generator
itself is not measured. Connections are direct, without a proxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from qserve.runtime.fleet.http_client import BadResponse, HttpExchange

Event = Callable[[bytes, float], None]
"""Takes the data of one event (https://html.spec.whatwg.org/multipage/server-sent-events.html) and when it came."""

MAX_BODY = 1 << 24  # bytes that are kept: a body that is no stream, or one line of a stream


class Connection(HttpExchange):
    """One exchange at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bytearray()  # of a response that is no stream of events
        self._text = bytearray()  # decoded, not yet a whole line
        self._event: Event | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0

    async def exchange(self, request: bytes, event: Event) -> None:
        """Send a request and follow the response to its end.

        ``status`` and ``headers`` hold its head; events go to ``event``, and any other body to ``body``. Raises
        ``ConnectionError`` where the connection ends too early, and ``BadResponse``.
        """
        assert self.transport is not None
        self._event = event
        self.body.clear()
        self._text.clear()
        self._done = asyncio.get_running_loop().create_future()
        self.begin(request)
        try:
            await self._done
        finally:
            self._done = None
            if not self.is_idle:
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        super().data_received(data)

    def part(self, content: bytes) -> None:
        if "event-stream" not in self.headers.get("content-type", ""):
            self.body += content
            if len(self.body) > MAX_BODY:
                raise BadResponse("the body of the response has no end")
            return
        assert self._event is not None
        text = self._text
        text += content
        if len(text) > MAX_BODY:
            raise BadResponse("a line of the stream has no end")
        if b"\n" not in content:
            return
        *lines, rest = text.split(b"\n")
        self._text = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._event(bytes(line[5:].strip()), self._now)

    def end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def failed(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
