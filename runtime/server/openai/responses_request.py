"""The request of ``/v1/responses``. The server stores no answers: fields that need them are refused by name.

Sampling fields have the bounds of ``SamplingParams``.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.constraint import Constraint
from qserve.runtime.sampling import Defaults, SamplingParams
from qserve.runtime.server.chat.tool_use import ToolUse
from qserve.runtime.server.openai.hints import Hints, ReasoningEffort, Verbosity
from qserve.runtime.server.openai.protocol import MAX_MESSAGES, Delivery, parse
from qserve.runtime.server.openai.responses_items import ITEMS, to_messages
from qserve.runtime.server.openai.strict import NotDone, Strict
from qserve.runtime.server.openai.tools import MAX_TOOLS, MODES, Function, Named, tool_use


class ResponseTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, data: Any) -> Any:
        """Check the type before the fields, since tools of other types have other fields."""
        if isinstance(data, dict) and data.get("type") != "function":
            raise PydanticCustomError("type", "must be 'function'; no other tools are known here", {"param": "type"})
        return data


class TextFormat(Strict):
    """``type`` json_schema needs ``schema``; either way the output follows it, so ``strict`` changes nothing."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        for name, value in (("name", self.name), ("schema", self.json_schema)):
            if (value is None) == (self.type == "json_schema"):
                raise PydanticCustomError("format", "is for the type json_schema, which needs it", {"param": name})
        return self

    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint("json_schema", '{"type": "object"}', "text.format")
        return Constraint("json_schema", json.dumps(self.json_schema), "text.format.schema")


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None  # a hint


class Reasoning(Strict):
    not_done: ClassVar[NotDone] = {
        "context": ("auto",),
        "generate_summary": ("auto",),
        "mode": ("standard",),
        "summary": ("auto",),
    }
    effort: ReasoningEffort | None = None  # a hint


class ResponseStreamOptions(Strict):
    not_done: ClassVar[NotDone] = {"include_obfuscation": (False,)}


class ResponseRequest(Hints):
    """``user`` and ``safety_identifier`` change nothing."""

    not_done: ClassVar[NotDone] = {
        "access_programs": (),
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "image": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "store": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str | None = None
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[ResponseTool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @field_validator("input")
    @classmethod
    def _input(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise PydanticCustomError("input", "must be a string or a list of items")
        if len(value) > MAX_MESSAGES:
            raise PydanticCustomError("input", f"holds {len(value)} items, at most {MAX_MESSAGES} are allowed")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        match value:
            case None | {"type": "function", "name": str()}:
                return value
            case str() if value in MODES:
                return value
        raise PydanticCustomError("tool_choice", "must be none, auto, required, or name one function of tools")

    def messages(self) -> list[dict[str, Any]]:
        """Raises ``APIError`` naming the item at fault."""
        items = []
        for index, item in enumerate(self.input):
            kind = item.get("type", "message") if isinstance(item, dict) else "message"
            # An item of an unknown type is checked as a message, which refuses it and names its type.
            model = ITEMS.get(kind, ITEMS["message"]) if isinstance(kind, str) else ITEMS["message"]
            items.append(parse(model, item, within=f"input[{index}]"))
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return first + to_messages(items)

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice
        named = Named(choice["name"], "tool_choice.name") if isinstance(choice, dict) else None
        return tool_use(self.tools or (), named or choice, self.parallel_tool_calls)

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        given = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        format = self.text.format if self.text else None
        constraint = format.constraint() if format else None
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        return SamplingParams(**{"max_tokens": None, "constraint": constraint} | dict(defaults) | given)

    def delivery(self) -> Delivery:
        return {"stream": bool(self.stream), "include_usage": True, "continuous_usage": False}

    def name_of(self, param: str | None) -> str | None:
        """The name in this request of the field that is ``param`` elsewhere."""
        return {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}.get(param or "", param)

    def shown(self, params: SamplingParams) -> dict[str, Any]:
        """The fields that a response repeats from its request."""
        format = self.text.format if self.text else None
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "text": {"format": (format or TextFormat()).model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_p": params.top_p,
            "user": self.user,
        }
