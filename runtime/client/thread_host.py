"""``ThreadHost``: an engine in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qserve.runtime.client.engine_loop import EngineLoop
from qserve.runtime.client.messages import Command, EngineInfo, Event, Stop

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine


class ThreadHost:
    """Runs an ``Engine`` in a thread of this process. Messages are handed over without encoding."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = EngineInfo.of(engine)
        self.source, self.tokenizer = engine.source, engine.tokenizer
        self._receive: Callable[[Sequence[Event]], None] = lambda events: None
        self._loop = EngineLoop(engine, lambda events: self._receive(events))
        self._thread = threading.Thread(target=self._loop.run, name="qserve-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, receive: Callable[[Sequence[Event]], None]) -> None:
        self._receive = receive
        self._thread.start()

    def send(self, command: Command) -> None:
        self._loop.put(command)

    def stop(self, timeout: float) -> None:
        self._loop.put(Stop())
        self._thread.join(timeout)

    def step_seconds(self) -> float:
        return self._loop.step_seconds()
