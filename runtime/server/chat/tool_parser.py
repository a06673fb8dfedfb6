"""``ToolParser``: splits a growing text into content and tool calls, by the layouts of ``tool_formats``.

The parts it gives out, joined, do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from qserve.runtime.server.chat.json_scan import JsonScan
from qserve.runtime.server.chat.parts import CallArguments, CallStart, Part, Text
from qserve.runtime.server.chat.tool_formats import ARGS, CALL_ID, ToolFormat
from qserve.runtime.stop_checker import overlap

# The usual beginning of a call, up to the brace of its arguments. From there on they can be given out as they come.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEAD_LIMIT = 1024
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS = ("type", "id", "name", "arguments", "parameters")


class ToolParser:
    """Takes text by ``feed`` and gives out parts; ``finish`` gives out what was held back.

    Text is held back while it may be the beginning of a marker, or of a call whose name is not known yet. If it turns
    out not to call one of the functions offered, it is content. Once a call has begun, its arguments are passed on as
    the model wrote them, valid or not; OpenAI's API does the same. White space around calls is dropped.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        """``names``: of the functions offered. ``max_calls``: text after so many calls is dropped."""
        self._format = format
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._state: Callable[[], bool] = self._opening if format.layout == "bare" else self._text
        self._buffer = ""
        self._raw = ""  # the beginning of a possible call, kept in case it is none
        self._in_list = False
        self._wrapped = False  # the arguments are inside an object that has a bracket of its own
        self._scan = JsonScan()
        self._parts: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Take more text; return what is certain now, perhaps nothing."""
        self._buffer += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output."""
        if self._state in (self._text, self._opening, self._marker, self._object, self._named):
            rest = self._raw + self._buffer
            self._content(rest.rstrip() if self.num_calls else rest)
        self._buffer = ""
        parts, self._parts = self._parts, []
        return parts

    # A state looks at the buffer, takes what it can, and says whether the next one may go on at once.

    def _opening(self) -> bool:
        """The answer has not begun: a brace opens a call without a marker."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] == "{":
            self._raw, self._buffer = self._buffer[: len(self._buffer) - len(text)], text
            self._state = self._marker
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        begin = self._format.begin
        at = self._buffer.find(begin)
        end = at if at >= 0 else len(self._buffer) - overlap(self._buffer, begin)
        text = self._buffer[:end].rstrip()
        self._content(text)
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._raw = self._buffer[len(text) : at] + begin
        self._buffer = self._buffer[at + len(begin) :]
        self._state = self._marker
        return True

    def _marker(self) -> bool:
        """After a marker or a separator: a call must follow."""
        text = self._buffer.lstrip()
        if not text:
            return False
        space = self._buffer[: len(self._buffer) - len(text)]
        listed = self._format.layout in ("list", "named")  # models of either format sometimes write the other
        if text[0] == "{":
            self._take(space, text)
            self._scan = JsonScan()
            self._state = self._object
        elif text[0] == "[" and listed and not self._in_list:
            self._take(space + "[", text[1:])
            self._in_list = True
        elif listed and not self._in_list:
            self._take(space, text)
            self._state = self._named
        else:
            self._reject(0)
        return True

    def _object(self) -> bool:
        """An object that may be a call."""
        if head := _HEAD.match(self._buffer[:_HEAD_LIMIT]):
            name = _loads(head[1])
            if name in self._names:
                self._buffer = self._buffer[head.end() :]
                self._start(name, JsonScan())
                return True
        key = _FIRST_KEY.match(self._buffer[:_HEAD_LIMIT])
        if key and key[1] not in _KEYS:
            return self._reject(key.end())
        end = self._scan.find(self._buffer)
        if end is None:
            return False
        call = None if self._scan.broken else _call(_loads(self._buffer[:end]))
        if call is None or call[0] not in self._names:
            return self._reject(end)
        self._buffer = self._buffer[end:]
        self._start(call[0], None)
        self._parts.append(CallArguments(self.num_calls - 1, call[1]))
        return True

    def _named(self) -> bool:
        """``name[ARGS]{...}``, perhaps with a ``[CALL_ID]`` in between."""
        at = self._buffer.find(ARGS, 0, _HEAD_LIMIT)
        if at < 0:
            return len(self._buffer) >= _HEAD_LIMIT and self._reject(0)
        arguments = self._buffer[at + len(ARGS) :].lstrip()
        if not arguments:
            return False
        name = self._buffer[:at].split(CALL_ID)[0].strip()
        if name not in self._names or arguments[0] != "{":
            return self._reject(at + len(ARGS))
        self._buffer = arguments
        self._start(name, JsonScan())
        return True

    def _arguments(self) -> bool:
        end = self._scan.find(self._buffer)
        text = self._buffer[:end]
        if text:
            self._parts.append(CallArguments(self.num_calls - 1, text))
        self._buffer = self._buffer[len(text) :]
        if end is None:
            self._scan.dropped()
            return False
        self._state = self._tail if self._wrapped and not self._scan.broken else self._after
        self._scan = JsonScan(depth=1)
        return True

    def _tail(self) -> bool:
        """The rest of an object after its arguments, with its closing bracket."""
        end = self._scan.find(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            self._scan.dropped()
            return False
        self._state = self._after
        return True

    def _after(self) -> bool:
        """A call has ended; its closing marker or a separator may follow."""
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            self._state = self._done
            return True
        text = self._buffer.lstrip()
        end = self._format.end
        if end and not self._in_list and text.startswith(end):
            self._buffer = text[len(end) :]
        elif not text or (end and end.startswith(text)):
            return False
        elif (self._in_list and text[0] == ",") or (self._format.layout == "bare" and text[0] == ";"):
            self._buffer = text[1:]
            self._state = self._marker
            return True
        elif self._in_list and text[0] == "]":
            self._buffer = text[1:]
        self._in_list = False
        self._state = self._text
        return True

    def _done(self) -> bool:
        self._buffer = ""
        return False

    def _take(self, raw: str, rest: str) -> None:
        self._raw += raw
        self._buffer = rest

    def _start(self, name: str, arguments: JsonScan | None) -> None:
        """A call has begun. ``arguments`` scans those at the buffer's beginning; None: they are known already."""
        self._wrapped = self._state == self._object
        self._raw = ""
        self._parts.append(CallStart(self.num_calls, self._format.call_id(), name))
        self.num_calls += 1
        if arguments is None:
            self._state = self._after
        else:
            self._scan = arguments
            self._state = self._arguments

    def _reject(self, end: int) -> bool:
        """Not a call: the text held back, and the buffer up to ``end``, are content."""
        self._content(self._raw + self._buffer[:end])
        self._raw, self._buffer = "", self._buffer[end:]
        self._in_list = False
        self._state = self._text
        return True

    def _content(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(content: Any) -> tuple[str, str] | None:
    """Name and arguments of a call that was written in another order or shape than usual."""
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    return (content["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
