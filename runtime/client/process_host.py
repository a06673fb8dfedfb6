"""``ProcessHost``: an engine in a process of its own, so that HTTP and tokens do not share an interpreter.

Messages go over a socket that only these two processes have.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.source import ModelSource
from qserve.runtime.client.codec import decode, encode
from qserve.runtime.client.messages import Command, Ended, Event, Heartbeat, Load, Loaded, Stop
from qserve.runtime.config import EngineConfig

logger = logging.getLogger(__name__)


class ProcessHost:
    """Starts the process and returns when the model is loaded. Raises ``QServeError`` where that fails."""

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        # -P: a folder here that is named like a module must not take its place.
        command = [sys.executable, "-P", "-m", "qserve.runtime.client.engine_process", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._socket = ours
        self._sending = threading.Lock()
        self._lines = ours.makefile("rb")
        self._receive: Callable[[Sequence[Event]], None] = lambda events: None
        self._reader = threading.Thread(target=self._read, name="qserve-engine-events", daemon=True)
        self._beat = Heartbeat(0.0)
        self._beat_time = 0.0
        self.send(Load(str(source.path), config))
        first = self._next()
        if not isinstance(first, Loaded):
            raise QServeError((first.failure if isinstance(first, Ended) else None) or "the engine did not start")
        self.info, self.source = first.info, source
        self.tokenizer = source.tokenizer()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, receive: Callable[[Sequence[Event]], None]) -> None:
        self._receive = receive
        self._reader.start()

    def send(self, command: Command) -> None:
        try:
            with self._sending:
                self._socket.sendall(encode(command))
        except OSError:  # the process has ended, as the reader is about to find out
            logger.debug("the engine is gone")

    def stop(self, timeout: float) -> None:
        self.send(Stop())
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout)

    def step_seconds(self) -> float:
        running = self._beat.step_seconds
        return running + (time.monotonic() - self._beat_time) if running else 0.0

    def _next(self) -> Event | None:
        line = self._lines.readline()
        return decode(line) if line else None

    def _read(self) -> None:
        ended = False
        while (event := self._next()) is not None:
            if isinstance(event, Heartbeat):
                self._beat, self._beat_time = event, time.monotonic()
                continue
            ended = isinstance(event, Ended)
            self._receive([event])
        if not ended:
            self._receive([Ended("the process of the engine has ended")])
