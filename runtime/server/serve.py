"""``serve`` and ``ServerHandle``: an engine behind HTTP, in the foreground or in a background thread.

Knows sockets, signals and the order of starting and stopping; does not know routes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qserve.checkpoint.errors import QServeError
from qserve.runtime.server.app import create_app
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.service import Service

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine

logger = logging.getLogger(__name__)

HEADER_TIMEOUT = 30.0  # seconds in which the headers of a connection's first request must have come


def claim_socket(host: str, port: int) -> socket.socket:
    """A listening socket on ``host:port`` (0: any free port), to be claimed before a model is loaded.

    Raises ``QServeError`` where the address cannot be had.
    """
    if not 0 <= port <= 65535:
        raise QServeError(f"cannot listen on {host}:{port}: a port is a number of 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise QServeError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # at once: two sockets could be bound to one port until one of them listens
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise QServeError(f"port {port} on {host} is in use; choose another with --port") from None
        raise QServeError(f"cannot listen on {host}:{port}: {error}") from None
    return sock


class _Protocol(H11Protocol):
    """HTTP/1.1, except that a connection whose first request does not come is closed: uvicorn would keep it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEADER_TIMEOUT, self._close_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._late.cancel()  # the connection goes to another protocol
        super().handle_websocket_upgrade(event)

    def _close_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn, except that the first signal drains and the second ends what is left at once."""

    def __init__(self, service: Service, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=_Protocol,
                ws="websockets-sansio",
                ws_max_size=service.config.max_body_bytes,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=5,
                timeout_keep_alive=75,  # longer than clients keep theirs: they close, and no request meets a closing
            )
        )
        self._service = service
        self._sock = sock
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.drain(0.0 if self._service.draining else self._service.config.drain_timeout)

    def drain(self, timeout: float) -> None:
        """Refuse new requests; end when the running ones have, or after ``timeout`` seconds without them."""
        self._service.draining = True
        self._deadline = time.monotonic() + timeout

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            late = time.monotonic() >= self._deadline
            if late:
                self._service.thread.abort_all()
            self.should_exit = late or not self.server_state.tasks
        return await super().on_tick(counter)

    def serve_until_stopped(self) -> None:
        self._service.thread.start()
        try:
            self.run(sockets=[self._sock])
        finally:
            self._service.thread.stop()
            self._sock.close()


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServerConfig | None = None,
    *,
    sock: socket.socket | None = None,
) -> None:
    """Serve until a signal ends it. ``sock``, from ``claim_socket``, takes the place of host and port."""
    _Server(Service(engine, config or ServerConfig()), sock or claim_socket(host, port)).serve_until_stopped()


class ServerHandle:
    """A server in a background thread; it owns the engine until ``stop``. A context manager."""

    def __init__(
        self,
        engine: Engine,
        host: str = "127.0.0.1",
        port: int = 0,
        config: ServerConfig | None = None,
        *,
        sock: socket.socket | None = None,
    ) -> None:
        sock = sock or claim_socket(host, port)
        self.host, self.port = sock.getsockname()[:2]
        self.service = Service(engine, config or ServerConfig())
        self._server = _Server(self.service, sock)
        self._thread = threading.Thread(target=self._server.serve_until_stopped, name="qserve-server", daemon=True)

    @property
    def url(self) -> str:
        """Where the API is, for a client's ``base_url``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def start(self) -> ServerHandle:
        """Return when requests are answered. Raises ``QServeError`` if the server does not come up."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise QServeError(f"the server on {self.host}:{self.port} did not start; its log says why")
            time.sleep(0.01)
        return self

    def drain(self, timeout: float) -> None:
        """As a first signal does: refuse new requests, let the running ones end in ``timeout`` seconds."""
        self._server.drain(timeout)

    def stop(self, timeout: float = 20.0) -> None:
        """End every request and the server."""
        self._server.drain(0.0)
        self._thread.join(timeout)

    def wait(self) -> None:
        """Until the server has ended."""
        self._thread.join()

    def __enter__(self) -> ServerHandle:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
