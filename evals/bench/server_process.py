"""``ServerProcess``: a server in its own process, which can be asked for its state, signalled and killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import httpx
import psutil

from qserve.checkpoint.errors import QServeError
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.serve import serve
from qserve.runtime.server.telemetry import logs

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class State:
    """A server's report on itself. ``rss``: bytes; ``cpu``: processor seconds so far; ``lost``: what is wrong with its
    blocks and requests, if something is."""

    running: int
    waiting: int
    blocks_used: int
    rss: int
    cpu: float
    lost: str | None

    @property
    def idle(self) -> bool:
        return self.running == self.waiting == self.blocks_used == 0


class ServerProcess:
    """Serves until it is stopped. Raises ``QServeError`` where it does not come up."""

    def __init__(self, model: str, engine: EngineConfig, server: ServerConfig, port: int = 0) -> None:
        self._control, theirs = _SPAWN.Pipe()
        self._process: SpawnProcess = _SPAWN.Process(target=_serve, args=(model, engine, server, port, theirs))
        self._process.start()
        theirs.close()
        try:
            answer: int | QServeError = self._control.recv()
        except EOFError:
            raise QServeError(f"the server of {model} did not start; its log says why") from None
        if isinstance(answer, QServeError):
            raise answer
        self.port = answer
        ready = f"http://127.0.0.1:{self.port}/ready"
        while httpx.get(ready, timeout=20).status_code != 200:
            time.sleep(0.01)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def state(self) -> State:
        self._control.send("state")
        return State(**self._control.recv())

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float) -> bool:
        """Whether it ended in time."""
        self._process.join(timeout)
        return self._process.exitcode is not None

    def children(self) -> list[psutil.Process]:
        """The live processes that it started."""
        return list(psutil.Process(self._process.pid).children(recursive=True))

    def until_idle(self, timeout: float) -> float:
        """Seconds until nothing runs, waits or holds a block; ``timeout`` if it takes longer."""
        began = time.monotonic()
        while not self.state().idle and time.monotonic() - began < timeout:
            time.sleep(0.01)
        return time.monotonic() - began

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(model: str, engine: EngineConfig, server: ServerConfig, port: int, control: Connection) -> None:
    logs.configure("json", "error")  # thousands of refusals are intended
    sock = claim_socket("127.0.0.1", port)
    try:
        made = Engine(model, engine)
    except QServeError as error:
        control.send(error)
        return
    threading.Thread(target=_report, args=(made, control, sock.getsockname()[1]), daemon=True).start()
    serve(made, config=server, sock=sock)


def _report(engine: Engine, control: Connection, port: int) -> None:
    control.send(port)
    process = psutil.Process()
    with contextlib.suppress(EOFError, OSError):
        while control.recv():
            stats, times = engine.stats(), process.cpu_times()
            answer: dict[str, Any] = {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "blocks_used": stats.kv_blocks_used,
                "rss": process.memory_info().rss,
                "cpu": times.user + times.system,
                "lost": None,
            }
            if not engine.has_work():  # only then is no other thread using it
                try:
                    engine.check()
                except AssertionError as error:
                    answer["lost"] = str(error) or "the engine's state is not in order"
            control.send(answer)
