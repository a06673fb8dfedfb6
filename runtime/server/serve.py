"""``serve`` and ``ServerHandle``: an engine behind HTTP, in the foreground or in a background thread.

Sockets, signals, and the order of starting and stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import uvicorn

from qserve.checkpoint.errors import QServeError
from qserve.runtime.client.process_host import ProcessHost
from qserve.runtime.client.thread_host import ThreadHost
from qserve.runtime.server.app import create_app
from qserve.runtime.server.batches.runner import BatchRunner
from qserve.runtime.server.batches.store import BatchStore
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket, url_of, uvicorn_config
from qserve.runtime.server.http.loading import LoadingApp
from qserve.runtime.server.limits.keys import KeyRing
from qserve.runtime.server.service import Service
from qserve.runtime.server.telemetry.logs import event

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine

logger = logging.getLogger(__name__)

FAILURE_GRACE = 2.0  # seconds from the engine's failure to the server's end, for clients and probes to see it
SIGNAL_DELAY = 0.5  # seconds, at most, until a signal is acted on that came just before the main thread slept


class _Server(uvicorn.Server):
    """uvicorn with three differences. It answers before there is an engine. The first signal drains it, and the second
    ends what is left at once. It ends by itself when the engine failed or a step is stuck.
    """

    def __init__(self, config: ServerConfig, sock: socket.socket) -> None:
        self._entrance = LoadingApp()
        super().__init__(uvicorn_config(self._entrance, config))
        self.keys = KeyRing(config.api_keys, config.api_keys_file)
        self.stuck = False
        self._batches: BatchRunner | None = None
        if config.batch_dir is not None:
            self._batches = BatchRunner(BatchStore(config.batch_dir, config.batch_dir_size), self.keys)
        self._batching: asyncio.Task[None] | None = None
        self._options = config
        self._service: Service | None = None
        self._sock = sock
        self._deadline: float | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine ended, if it did."""
        return self._service.engine.failure if self._service else None

    def _ends(self) -> bool:
        return self._deadline is not None or self.failure is not None

    def open(self, service: Service) -> None:
        """The engine is there: start its thread and let requests in."""
        service.engine.start()
        self._service = service
        self._entrance.app = create_app(service, self._batches)
        if isinstance(name := self._sock.getsockname(), str):
            event(logger, "ready", model=service.model_name, uds=name)
        else:
            event(logger, "ready", model=service.model_name, address=name[0], port=name[1])

    def signalled(self) -> None:
        """SIGTERM or Ctrl-C."""
        self.drain(self._options.drain_timeout if self._deadline is None else 0.0)

    def drain(self, timeout: float) -> None:
        """Refuse new requests. End when the running ones have ended; after ``timeout`` seconds abort them and end."""
        event(logger, "draining", timeout_seconds=timeout)
        if self._service is not None:
            self._service.draining = True
        self._deadline = time.monotonic() + timeout

    async def on_tick(self, counter: int) -> bool:
        self._watch()
        self._tend_batches()
        if self._deadline is not None:
            late = time.monotonic() >= self._deadline
            if self._service is not None:
                self._service.closing.set()
                if late:
                    self._service.engine.abort_all()
            lingers = self.failure is not None and not late
            self.should_exit = late or not (self.server_state.tasks or lingers)
        return await super().on_tick(counter)

    def _tend_batches(self) -> None:
        """Work on them from the first request to the drain. What is not answered then waits for the next server."""
        if self._batching is not None and self._deadline is not None:
            self._batching.cancel()
        if self._batches is not None and self._entrance.app is not None and self._batching is None:
            self._batching = asyncio.create_task(self._batches.run(self._entrance.app, self._ends))

    def _watch(self) -> None:
        """Notice a failed engine or a stuck step. Running requests fail with it, and the server ends soon."""
        service, limit = self._service, self._options.step_timeout
        if service is None:
            return
        if limit and not self.stuck and (seconds := service.engine.step_seconds()) > limit:
            self.stuck = True
            logger.critical("a step of the engine has been running for %.0f s; the server ends", seconds)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is not a file
                faulthandler.dump_traceback(all_threads=True)
            service.engine.give_up(f"a step of the engine did not end in {limit:g} seconds")
        if service.engine.failure is not None and not service.draining:
            self.drain(FAILURE_GRACE)

    def serve_until_stopped(self) -> None:
        try:
            self.run(sockets=[self._sock])
        finally:
            if self._service is not None:
                self._service.close(0.0 if self.stuck else 10.0)
            if self._batches is not None:
                self._batches.store.close()
            self._sock.close()
            event(logger, "ended")


def serve(
    engine: Engine | Callable[[], Engine | ProcessHost],
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServerConfig | None = None,
    *,
    sock: socket.socket | None = None,
    opened: Callable[[], None] | None = None,
) -> None:
    """Serve until a signal ends it. ``sock``, from ``claim_socket``, takes the place of host and port.

    Where ``engine`` is a function that loads one, here or in a process of its own, the probes answer while it does;
    ``opened`` is called once requests are let in. Raises ``QServeError`` when the engine fails for good. A step that is
    stuck cannot be ended, so it ends the process, with exit code 1.
    """
    config = config or ServerConfig()
    server = _Server(config, sock or claim_socket(host, port))
    with _signals({signal.SIGHUP: server.keys.reload}):  # also while it loads: by default this signal ends a process
        thread = _start(server)
        try:
            loaded = engine() if callable(engine) else engine
            # What is loaded stays. To look through half a million objects for garbage would stop every stream for
            # 0.2 s.
            gc.collect()
            gc.freeze()
            engine_host = loaded if isinstance(loaded, ProcessHost) else ThreadHost(loaded)
            service = Service(engine_host, config, server.keys)
            service.constraints.start()
            with _signals(dict.fromkeys((signal.SIGTERM, signal.SIGINT), server.signalled)):
                server.open(service)
                service.engine.prepare_grammars()
                if opened is not None:
                    opened()
                while thread.is_alive():
                    thread.join(SIGNAL_DELAY)
        finally:
            if thread.is_alive():
                server.drain(0.0)
            thread.join()
            gc.unfreeze()
    if server.stuck:
        logging.shutdown()
        os._exit(1)
    if server.failure is not None:
        raise QServeError(server.failure)


@contextlib.contextmanager
def _signals(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """What these signals do meanwhile. Only a main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        handlers[signal.Signals(number)]()

    previous = {number: signal.signal(number, handle) for number in handlers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(server: _Server) -> threading.Thread:
    """Run it in a thread of its own; return when it listens. Raises ``QServeError`` if it does not come up."""
    thread = threading.Thread(target=server.serve_until_stopped, name="qserve-server", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise QServeError("the server did not start; its log says why")
        time.sleep(0.01)
    return thread


class ServerHandle:
    """A server in a background thread; it owns the engine until ``stop``. A context manager.

    ``host`` and ``port`` are where it listens, for a Unix socket its path and 0; ``url`` is a client's ``base_url``.
    """

    def __init__(
        self,
        engine: Engine,
        host: str = "127.0.0.1",
        port: int = 0,
        config: ServerConfig | None = None,
        *,
        sock: socket.socket | None = None,
    ) -> None:
        config = config or ServerConfig()
        sock = sock or claim_socket(host, port)
        name: str | tuple[str, int] = sock.getsockname()
        self.host, self.port = (name, 0) if isinstance(name, str) else (name[0], name[1])
        self.url = url_of(sock, config)
        self._server = _Server(config, sock)
        self.service = Service(ThreadHost(engine), config, self._server.keys)

    def start(self) -> ServerHandle:
        """Return when requests are answered. Raises ``QServeError`` if the server does not come up."""
        self._thread = _start(self._server)
        self._server.open(self.service)
        return self

    def drain(self, timeout: float) -> None:
        """Like a first signal: refuse new requests, and let the running ones end within ``timeout`` seconds."""
        self._server.drain(timeout)

    def stop(self, timeout: float = 20.0) -> None:
        """End every request and the server."""
        self._server.drain(0.0)
        self._thread.join(timeout)

    def wait(self) -> None:
        """Return when the server has ended."""
        self._thread.join()

    def __enter__(self) -> ServerHandle:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
