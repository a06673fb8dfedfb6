"""``EngineHost``: carries messages between a client and an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from qserve.runtime.client.messages import Command, EngineInfo, Event

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qserve.checkpoint.source import ModelSource


class EngineHost(Protocol):
    """Where an engine runs. ``source`` and ``tokenizer`` are of the model that it serves."""

    info: EngineInfo
    source: ModelSource
    tokenizer: PreTrainedTokenizerBase

    @property
    def alive(self) -> bool: ...

    def start(self, receive: Callable[[Sequence[Event]], None]) -> None:
        """Begin; ``receive`` is called with events, in order, by a thread of the host's own."""

    def send(self, command: Command) -> None:
        """Hand over a command, from any thread. It is dropped if the engine has ended."""

    def stop(self, timeout: float) -> None:
        """End the engine and wait for that, ``timeout`` seconds at most."""

    def step_seconds(self) -> float:
        """How long the current step has been running; 0 between steps."""
