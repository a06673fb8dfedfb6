"""``BlockParser``: finds the calls of a ``BlockFormat`` in text that arrives in pieces."""

from __future__ import annotations

import json
import re

from qserve.runtime.server.chat.argument_schema import Schemas
from qserve.runtime.server.chat.block_formats import BlockFormat, Call
from qserve.runtime.server.chat.parts import CallArguments, CallStart, Part, Text
from qserve.runtime.stop_checker import overlap

_BARE = re.compile(r"\[\s*(?:[A-Za-z_]|\Z)")


class BlockParser:
    """Takes text by ``feed`` and gives out parts; ``finish`` gives out what was held back.

    A call is given out when its block has ended, in one piece: only then is it known to be one. A block that holds
    anything but calls of the functions offered is content, markers and all. White space around calls is dropped.
    """

    def __init__(self, format: BlockFormat, schemas: Schemas, max_calls: int | None = None) -> None:
        """``schemas``: of the functions offered. ``max_calls``: text after so many calls is dropped."""
        self._format = format
        self._schemas = schemas
        self._max_calls = max_calls
        self._markers = (format.begin, *format.around)
        self._buffer = ""
        self._raw: str | None = None  # in a block: its marker, with the space before it
        self._searched = 0
        self._bare = False
        self._begun = not format.bare
        self._parts: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Take more text; return what is certain now, perhaps nothing."""
        self._buffer += text
        while self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output. A last block may lack its end marker."""
        if not self._full:
            if self._raw is not None and self._format.ends_itself and self._calls(self._buffer):
                self._buffer, self._raw = "", None
            rest = (self._raw or "") + self._buffer
            self._content(rest.rstrip() if self.num_calls else rest)
        self._buffer, self._raw = "", None
        parts, self._parts = self._parts, []
        return parts

    @property
    def _full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def _step(self) -> bool:
        """Look at the buffer and take what is certain; whether there may be more."""
        if self._full:
            self._buffer = ""
            return False
        if not self._begun:
            return self._opening()
        return self._text() if self._raw is None else self._block()

    def _opening(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        self._begun = True
        if text[0] == "[":
            self._bare, self._raw = True, ""
        return True

    def _text(self) -> bool:
        found = [(at, -len(marker), marker) for marker in self._markers if (at := self._buffer.find(marker)) >= 0]
        if not found:
            held = max(overlap(self._buffer, marker) for marker in self._markers)
            text = self._buffer[: len(self._buffer) - held].rstrip()
            self._content(text)
            self._buffer = self._buffer[len(text) :]
            return False
        at, _, marker = min(found)
        text = self._buffer[:at].rstrip()
        self._content(text)
        if marker == self._format.begin:
            self._raw = self._buffer[len(text) : at] + marker
        self._buffer = self._buffer[at + len(marker) :]
        return True

    def _block(self) -> bool:
        if self._bare:
            if _BARE.match(self._buffer.lstrip()):
                return False  # it ends with the answer
            self._bare, self._raw = False, None
            return True
        end = self._format.end
        at = self._buffer.find(end, self._searched)
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(end) + 1)
            return False
        block, self._buffer, self._searched = self._buffer[:at], self._buffer[at + len(end) :], 0
        raw, self._raw = self._raw or "", None
        if not self._calls(block):
            self._content(raw + block + end)
        return True

    def _calls(self, block: str) -> bool:
        """Give out the calls of a block; False where it holds anything else."""
        try:
            calls: list[Call] = self._format.read(block, self._schemas)
            written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
        except (ValueError, TypeError, RecursionError):
            return False
        if not written or any(name not in self._schemas for name, _ in written):
            return False
        for name, arguments in written:
            if not self._full:
                self._parts.append(CallStart(self.num_calls, self._format.call_id(block), name))
                self._parts.append(CallArguments(self.num_calls, arguments))
                self.num_calls += 1
        return True

    def _content(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))
