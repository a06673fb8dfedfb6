"""The items of ``/v1/responses``: what a request's ``input`` may hold, and the messages that they become.

A model reads messages, so the items of one turn of the assistant (reasoning, text, calls) become one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.server.openai.messages import MAX_ID, CalledFunction, check_name
from qserve.runtime.server.openai.strict import NotDone, Strict


def _text(value: Any, kinds: tuple[str, ...]) -> str:
    """The text of a string or of a list of parts. Other fields that our own answers give a part are ignored."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    for part in value:
        if part.get("type") not in kinds:
            kind = str(part.get("type"))[:40]
            raise PydanticCustomError("content", f"holds a part of type '{kind}'; only {' and '.join(kinds)} may be")
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text", "annotations", "logprobs"}:
            raise PydanticCustomError("content", "holds a text part with other fields than type and text")
    return "".join(part["text"] for part in value)


class _Item(Strict):
    """``id`` and ``status`` come back with items of earlier answers and change nothing."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item):
    not_done: ClassVar[NotDone] = {"phase": ()}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Any

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any) -> str:
        return _text(value, ("input_text", "output_text"))


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MAX_ID)
    name: str
    arguments: str

    _name = field_validator("name")(check_name)

    def for_template(self) -> dict[str, Any]:
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return {"id": self.call_id, "type": "function", "function": function.for_template()}


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MAX_ID)
    output: Any

    @field_validator("output")
    @classmethod
    def _output(cls, value: Any) -> str:
        return _text(value, ("input_text",))


class Reasoning(_Item):
    not_done: ClassVar[NotDone] = {"encrypted_content": (), "summary": ([],)}

    type: Literal["reasoning"]
    content: Any = None

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any) -> str:
        return "" if value is None else _text(value, ("reasoning_text",))


Item = InputMessage | FunctionCall | FunctionCallOutput | Reasoning
ITEMS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}


def to_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Messages as chat templates want them."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's turn, while it goes on
    for item in items:
        if isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            turn = None
        elif isinstance(item, InputMessage) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content})
            turn = None
        else:
            new = isinstance(item, Reasoning | InputMessage)
            if turn is None or (new and (turn["content"] or "tool_calls" in turn)):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            if isinstance(item, InputMessage):
                turn["content"] = item.content
            elif isinstance(item, Reasoning):
                turn["reasoning_content"] = item.content
            else:
                turn.setdefault("tool_calls", []).append(item.for_template())
    return messages
