"""``Connection``: uvicorn's HTTP/1.1, except for silent connections, malformed request heads, and bodies that are
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.write_deadline import WriteDeadline

HEADER_TIMEOUT = 30.0  # seconds until the headers of a connection's first request must have come
REFUSED_SECONDS = 5.0  # that a client whose head was refused may go on sending before it reads why
DISCARD = "qserve.discard"  # key in a scope: ``await scope[DISCARD](seconds)``, after the answer, ends its connection
# Key in a scope: ``scope[BROKEN]()`` says whether the connection is. uvicorn hears of it a turn of the loop later.
BROKEN = "qserve.broken"
_REFUSALS = {
    431: "the request head is too large",
    400: "this is no valid HTTP/1.1 request",
}


class Connection(WriteDeadline, H11Protocol):
    """Closes a connection whose next request does not come, even where part of its head did; uvicorn would keep it.
    Bytes that cannot be read as a request are answered with an error object, in a way that the client can read it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._refused = False
        self._gone = asyncio.Event()
        self._late = self.loop.call_later(HEADER_TIMEOUT, self._close_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        self._gone.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:  # closing while the client still sends would reset its connection
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is None:
            return
        scope = cast(dict[str, Any], self.scope)
        scope[BROKEN] = self.transport.is_closing
        if self.transport.can_write_eof():  # not with TLS
            scope[DISCARD] = self._discard

    async def _discard(self, timeout: float) -> None:
        """End the sending side, and drop what comes until the client closes. It is not parsed: a megabyte parsed for
        nothing would keep the interpreter from every stream."""
        self._refused = True
        self.transport.write_eof()
        self.flow.resume_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._gone.wait()
        self.transport.abort()
        await self._gone.wait()

    def on_response_complete(self) -> None:
        self._late.cancel()
        self._late = self.loop.call_later(self.timeout_keep_alive, self._close_silent)
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._late.cancel()  # the connection goes to another protocol
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Called while the ``h11.RemoteProtocolError`` that says what is wrong is being handled."""
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the body is broken, and its answer has begun
            self.transport.close()
            return
        status = getattr(sys.exception(), "error_status_hint", 400)
        status = status if status in _REFUSALS else 400
        answer = APIError(status, _REFUSALS[status]).response()
        head = h11.Response(status_code=status, headers=[*answer.raw_headers, (b"connection", b"close")])
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # a request waits for its body, which is broken
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._late.cancel()
        self._late = self.loop.call_later(REFUSED_SECONDS, self.transport.close)

    def _close_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
