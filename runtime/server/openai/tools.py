"""``Tool``: a function that the client offers, and ``tool_use``, which reads a request's fields about its tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.tool_use import OfferedTool, ToolUse
from qserve.runtime.server.openai.messages import check_name
from qserve.runtime.server.openai.strict import Strict

MAX_TOOLS = 128
MAX_DESCRIPTION = 16_384
MAX_SCHEMA = 65_536

Mode = Literal["none", "auto", "required"]
MODES: dict[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}


class Function(Strict):
    """``parameters``: the JSON schema of an object; a function without it has no parameters."""

    name: str
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    _name = field_validator("name")(check_name)

    @field_validator("parameters")
    @classmethod
    def _schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type", "object") != "object":
            raise PydanticCustomError("parameters", "must be the JSON schema of an object, with type 'object'")
        if value is not None and (size := len(json.dumps(value, ensure_ascii=False))) > MAX_SCHEMA:
            raise PydanticCustomError(
                "parameters", f"has {size:,} characters as JSON, at most {MAX_SCHEMA:,} are allowed"
            )
        return value


class Tool(Strict):
    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class Named:
    """The choice of one function; ``param`` is the field that named it."""

    name: str
    param: str


def tool_use(functions: Sequence[Function], choice: Mode | Named | None, parallel: bool | None) -> ToolUse:
    """What a request wants of its tools. Raises ``RequestError`` where its fields do not fit together."""
    offered = tuple(map(_offered, functions))
    names = [tool.name for tool in offered]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"tools holds the function {twice!r} twice", "tools")
    if not offered and choice not in (None, "none"):
        raise RequestError("tool_choice needs tools", "tool_choice")
    if not offered or choice == "none":
        return ToolUse()
    chosen = offered
    if isinstance(choice, Named):
        chosen = tuple(tool for tool in offered if tool.name == choice.name)
        if not chosen:
            raise RequestError(f"tool_choice names the function {choice.name!r:.80}, which tools lacks", choice.param)
    return ToolUse(offered, chosen, choice not in (None, "auto"), parallel is not False)


def chat_choice(value: Any) -> Mode | Named | None:
    """``tool_choice`` as ``/v1/chat/completions`` has it."""
    if value is None:
        return None
    if isinstance(value, str) and value in MODES:
        return MODES[value]
    match value:
        case {"type": "function", "function": {"name": str(name), **rest}, **more} if not rest and not more:
            return Named(name, "tool_choice.function.name")
    raise PydanticCustomError("tool_choice", "must be none, auto, required, or name one function of tools")


def _offered(function: Function) -> OfferedTool:
    schema = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    return OfferedTool(function.name, {"type": "object"} | schema, function.description, bool(function.strict))
