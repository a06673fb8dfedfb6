"""``RouterServer``: the router of a fleet behind HTTP, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.fleet.ingress import Ingress
from qserve.runtime.fleet.scaling import Scaling
from qserve.runtime.server.batches.runner import BatchRunner
from qserve.runtime.server.batches.store import BatchStore
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.authentication import AuthenticationMiddleware
from qserve.runtime.server.http.browser_guard import BrowserGuard
from qserve.runtime.server.http.lingering_close import LingeringClose
from qserve.runtime.server.http.listening import uvicorn_config
from qserve.runtime.server.limits.keys import KeyRing
from qserve.runtime.server.telemetry.access_log import AccessLog, AccessLogMiddleware
from qserve.runtime.server.telemetry.logs import event

logger = logging.getLogger(__name__)


class RouterServer(uvicorn.Server):
    """A first signal drains it: new requests are refused, and it ends with the last that runs, after
    ``drain_timeout`` seconds at the latest. A second one ends it at once.
    """

    def __init__(
        self, fleet: Fleet, config: ServerConfig, sock: socket.socket, scaling: Scaling | None = None
    ) -> None:
        self.keys = KeyRing(config.api_keys, config.api_keys_file)
        self._batches: BatchRunner | None = None
        if config.batch_dir is not None:
            self._batches = BatchRunner(BatchStore(config.batch_dir, config.batch_dir_size), self.keys)
        self.ingress = Ingress(fleet, config, self.keys, self._batches)
        self._app = _app(self.ingress, config, self.keys)
        super().__init__(uvicorn_config(self._app, config))
        self._watches = [fleet.watch, *([scaling.watch] if scaling else [])]
        self._options = config
        self._sock = sock
        self._deadline: float | None = None
        self.listens = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None  # once it listens

    def serve_until_stopped(self) -> None:
        previous = signal.signal(signal.SIGHUP, lambda *_: self.keys.reload())
        try:
            self.run(sockets=[self._sock])
        finally:
            signal.signal(signal.SIGHUP, previous)
            self._sock.close()
            if self._batches is not None:
                self._batches.store.close()
            event(logger, "ended")

    def drain(self, timeout: float) -> None:
        event(logger, "draining", timeout_seconds=timeout)
        self.ingress.draining = True
        self._deadline = time.monotonic() + timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.drain(self._options.drain_timeout if self._deadline is None else 0.0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self._watching = [asyncio.create_task(watch()) for watch in self._watches]
        self._batching = None
        if self._batches is not None:
            self._batching = asyncio.create_task(self._batches.run(self._app, lambda: self._deadline is not None))
        self.listens.set()

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            if self._batching is not None:  # what is not answered waits for the next router
                self._batching.cancel()
            self.should_exit = time.monotonic() >= self._deadline or not self.server_state.tasks
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for task in self._watching:
            task.cancel()
        await asyncio.wait(self._watching)


def _app(ingress: Ingress, config: ServerConfig, keys: KeyRing) -> ASGIApp:
    """With the same guards as one server, in the same order."""
    app: ASGIApp = AuthenticationMiddleware(ingress, keys)
    if not keys:
        app = BrowserGuard(app, config.allowed_hosts, config.cors_origins)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key", "X-Request-Id", "traceparent"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    log = AccessLog("", ingress.metrics, None, lambda: ingress.draining)
    return LingeringClose(AccessLogMiddleware(app, log))
