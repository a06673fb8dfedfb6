"""``EngineHost``: what carries messages between a client and an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from qserve.runtime.client.messages import Command, EngineInfo, Event


class EngineHost(Protocol):
    """Where an engine runs. ``info`` is known from the start."""

    info: EngineInfo

    @property
    def alive(self) -> bool: ...

    def start(self, receive: Callable[[Sequence[Event]], None]) -> None:
        """Begin; ``receive`` is called with events, in order, by a thread of the host's own."""

    def send(self, command: Command) -> None:
        """Hand over a command, from any thread. Once the engine has ended it is forgotten."""

    def stop(self, timeout: float) -> None:
        """End the engine and wait for that, at most ``timeout`` seconds."""

    def step_seconds(self) -> float:
        """For how long the step that runs now has been running; 0 between steps."""
