"""Messages as lines of bytes: the name of a message, a space, and its fields as JSON. They can hold no code."""

from __future__ import annotations

from functools import cache
from types import GenericAlias
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter

from qserve.runtime.client.messages import Command, Event

_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Event))}
_CONFIG = ConfigDict(ser_json_inf_nan="constants")  # a log-probability may be minus infinity


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    one: Any = GenericAlias(tuple, (_TYPES[name],))  # a dataclass by itself takes no configuration
    return TypeAdapter(one, config=_CONFIG)


def encode(message: Command | Event) -> bytes:
    """One line with its end."""
    name = type(message).__name__
    return name.encode() + b" " + _adapter(name).dump_json((message,), warnings=False) + b"\n"


def decode(line: bytes) -> Any:
    """The ``Command`` or ``Event`` of a line. Raises ``ValueError`` or ``KeyError`` for any other line."""
    name, _, content = line.partition(b" ")
    return _adapter(name.decode()).validate_json(content)[0]
