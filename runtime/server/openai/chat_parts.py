"""The parts of an answer as ``/v1/chat/completions`` shows them: a whole message, or a delta of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qserve.runtime.server.chat.parts import CallArguments, CallStart, Part, Text, Thought


def chat_message(parts: Sequence[Part]) -> dict[str, Any]:
    """``content`` is null where there are only calls. Empty ``reasoning_content`` and ``tool_calls`` are left out."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append(_call(part))
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    content = "".join(part.text for part in parts if isinstance(part, Text))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
    message["refusal"] = None
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def chat_delta(part: Part) -> dict[str, Any]:
    """A call's first fragment has its id, type and name; the others have pieces of its arguments."""
    match part:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(index):
            return {"tool_calls": [{"index": index, **_call(part)}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(start: CallStart) -> dict[str, Any]:
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": ""}}
