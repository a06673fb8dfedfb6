"""The parts of an answer, piece by piece as it is generated. Plain data, for any tool format and any JSON shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """More of the answer proper."""

    text: str


@dataclass(frozen=True)
class Thought:
    """More of the reasoning that comes before the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Call number ``index`` of a tool begins; ``id`` is what its result will refer to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of call number ``index``: JSON, as the model wrote it."""

    index: int
    text: str


Part = Text | Thought | CallStart | CallArguments
