"""``WriteDeadline``: a connection whose client has stopped reading ends, and with it what waits for that client."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

WRITE_SECONDS = 60.0  # in which a client must take what was written for it: some 50 KB, once more than 64 KB wait


class WriteDeadline(asyncio.Protocol):
    """Put it before a protocol that waits for room in its ``transport``. Closing would wait for the client for ever, so
    the connection is broken off."""

    transport: Any
    loop: Any
    _until: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._until = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._until is not None:
            self._until.cancel()
            self._until = None


class Socket(WriteDeadline, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, with the deadline."""
