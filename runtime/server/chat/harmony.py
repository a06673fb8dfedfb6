"""``HarmonyParser``: answers of GPT-OSS, whose messages name a channel and sometimes a recipient.

The layout is that of OpenAI's harmony response format: ``<|channel|>analysis<|message|>...<|end|>``, and calls as
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from qserve.runtime.server.chat.parts import CallArguments, CallStart, Part, Text, Thought
from qserve.runtime.stop_checker import overlap

SIGN = "<|channel|>"
FINAL = "<|channel|>final<|message|>"  # after a prompt: what follows is the answer proper
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MARKERS = (_MESSAGE, "<|constrain|>", *_ENDS)
_OPENINGS = ("<|channel|>", "<|start|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.(.+?)(?=<\||\s|\Z)")


def for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning under the name that GPT-OSS's template reads. Beside calls the template refuses
    both reasoning and content; then only the content stays."""
    rest = dict(message)
    thought = rest.pop("reasoning_content", None)
    if thought is None or (rest.get("tool_calls") and rest.get("content")):
        return rest
    return rest | {"thinking": thought}


class HarmonyParser:
    """Reads reasoning, content and calls in one pass, with the methods of ``OutputParser``.

    Analysis is reasoning. What is addressed to a function that is offered is a call; its arguments are passed on as
    they come. Every other message is content. An answer that begins without a channel is the content of its first
    message.
    """

    def __init__(
        self,
        names: Collection[str],
        max_calls: int | None = None,
        *,
        shows_reasoning: bool = True,
        opened: bool = False,
    ) -> None:
        """``names``: of the functions offered. ``max_calls``: calls after so many are dropped. ``shows_reasoning``:
        otherwise it is dropped. ``opened``: the prompt ends inside a message, which is content."""
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self._buffer = ""
        self._state = "body" if opened else "opening"  # or header
        self._kind = "text"  # of the body, or thought, call, dropped
        self._empty = True
        self.num_calls = 0

    @property
    def thinking(self) -> bool:
        return self._state == "body" and self._kind == "thought"

    def feed(self, text: str) -> list[Part]:
        """Take more text; return what is certain now, perhaps nothing."""
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output. A message's head that was cut off is dropped."""
        parts: list[Part] = []
        if self._state == "body":
            self._more(parts, self._buffer)
            self._end(parts)
        elif self._state == "opening" and self._buffer.strip()[:1] != "<":
            self._more(parts, self._buffer)
        self._buffer = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case "opening":
                text = self._buffer.lstrip()
                if any(text.startswith(opening) for opening in _OPENINGS):
                    self._state = "header"
                elif any(opening.startswith(text) for opening in _OPENINGS):
                    return False
                else:
                    self._state = "body"
                return True
            case "header":
                return self._header(parts)
        found = [at for end in _ENDS if (at := self._buffer.find(end)) >= 0]
        stop = min(found) if found else len(self._buffer) - max(overlap(self._buffer, end) for end in _ENDS)
        self._more(parts, self._buffer[:stop])
        self._buffer = self._buffer[stop:]
        if found:
            self._end(parts)
            self._state = "header"
        return bool(found)

    def _header(self, parts: list[Part]) -> bool:
        head, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark:
            return False
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._state, self._buffer, self._empty = "body", rest, True
        if recipient and recipient[1] in self._names:
            if self._max_calls is not None and self.num_calls >= self._max_calls:
                self._kind = "dropped"
            else:
                self._kind = "call"
                parts.append(CallStart(self.num_calls, f"call_{secrets.token_hex(12)}", recipient[1]))
                self.num_calls += 1
        else:
            self._kind = "thought" if channel and channel[1] == "analysis" else "text"
        return True

    def _more(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        self._empty = False
        match self._kind:
            case "thought" if self._shows_reasoning:
                parts.append(Thought(text))
            case "call":
                parts.append(CallArguments(self.num_calls - 1, text))
            case "text":
                parts.append(Text(text))

    def _end(self, parts: list[Part]) -> None:
        if self._kind == "call" and self._empty:
            self._more(parts, "{}")
