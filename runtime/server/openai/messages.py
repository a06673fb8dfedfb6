"""``Message``: one message of a conversation as the client sends it, and as chat templates want it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.body import parse_object
from qserve.runtime.server.openai.strict import NotDone, Strict

MAX_CALLS = 128
MAX_NAME = 64
MAX_ID = 256


def check_name(value: str) -> str:
    """The name of a function: more characters than OpenAI allows, but none that breaks a line or a marker."""
    if not value or len(value) > MAX_NAME or not value.isprintable():
        raise PydanticCustomError("name", f"must have 1 to {MAX_NAME} printable characters")
    return value


class CalledFunction(Strict):
    """``arguments`` is JSON in a string. A model wrote it: a string that is not a valid JSON object stays a string."""

    name: str
    arguments: str

    _name = field_validator("name")(check_name)

    def for_template(self) -> dict[str, Any]:
        try:
            arguments: Any = parse_object((self.arguments or "{}").encode())
        except APIError:
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Strict):
    id: str = Field(min_length=1, max_length=MAX_ID)
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}


class Message(Strict):
    """One message; ``content`` becomes a string. The role ``developer`` is today's name of ``system``."""

    not_done: ClassVar[NotDone] = {
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = Field(default=None, min_length=1, max_length=MAX_ID)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_CALLS, fail_fast=True)
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise PydanticCustomError("content", "must be a string or a list of text parts")
        for part in value:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise PydanticCustomError("content", "must be a string or a list of text parts")
            if part["type"] != "text":
                kind = part["type"][:40]
                raise PydanticCustomError("content", f"holds a part of type '{kind}'; only text is supported")
            if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
                raise PydanticCustomError("content", "holds a text part with other fields than type and text")
        return "".join(part["text"] for part in value)

    @model_validator(mode="after")
    def _by_role(self) -> Message:
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise PydanticCustomError("role", f"is for messages of the role {role}", {"param": name})
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("role", "must name the call that was answered", {"param": "tool_call_id"})
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("role", "must be a string or a list of text parts", {"param": "content"})
        return self

    def for_template(self) -> dict[str, Any]:
        """The fields that are set. A call without words has an empty content, because some templates print null."""
        more = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "reasoning_content": self.reasoning_content,
        }
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        return message | {name: value for name, value in more.items() if value is not None}
