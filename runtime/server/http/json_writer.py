"""``JsonWriter``: large answers as JSON, made piece by piece, so that other requests have their turn in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse

PIECE = 1 << 15  # characters; some milliseconds of work

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list)
compact_json = _ENCODER.encode
"""A tree as JSON in one piece. An iterator in it is a list."""


class JsonWriter:
    """Writes one piece at a time, whichever answer it belongs to. All answers share one event loop.

    A long list in an answer is given as an iterator: its items are made when their piece is written.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def response(self, content: Any) -> Response:
        """A small answer as a whole, with its length; a large one in pieces, as fast as the client reads them."""
        pieces = _pieces(content)
        first = next(pieces)
        if len(first) < PIECE:
            return Response(first, media_type="application/json")
        return StreamingResponse(self._rest(first, pieces), media_type="application/json")

    async def text(self, content: Any) -> str:
        pieces = _pieces(content)
        first = next(pieces)
        return first if len(first) < PIECE else "".join([piece async for piece in self._rest(first, pieces)])

    async def _rest(self, piece: str, pieces: Iterator[str]) -> AsyncIterator[str]:
        while piece:
            yield piece
            async with self._turn:
                await asyncio.sleep(0)
                piece = next(pieces, "")


def _pieces(content: Any) -> Iterator[str]:
    """Each but the last has at least ``PIECE`` characters; the last may be empty."""
    parts: list[str] = []
    size = 0
    for part in _parts(content):
        parts.append(part)
        size += len(part)
        if size >= PIECE:
            yield "".join(parts)
            parts, size = [], 0
    yield "".join(parts)


def _parts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for i, (name, value) in enumerate(node.items()):
            yield f"{',' if i else '{'}{compact_json(name)}:"
            yield from _parts(value)
        yield "}" if node else "{}"
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield "," if i else "["
            yield from _parts(value)
        yield "]" if node else "[]"
    elif isinstance(node, Iterator):
        yield "["
        for i, value in enumerate(node):
            yield f"{',' if i else ''}{compact_json(value)}"
        yield "]"
    else:
        yield compact_json(node)
