"""The requests of ``/v1/messages`` and ``/v1/messages/count_tokens``.

Sampling fields have the bounds of ``SamplingParams``. What Anthropic has and this server does not is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.constraint import Constraint
from qserve.runtime.sampling import MAX_STOP_STRINGS, Defaults, RequestError, SamplingParams
from qserve.runtime.server.anthropic.blocks import (
    CacheControl,
    InputMessage,
    OptionalContent,
    read_blocks,
    template_messages,
)
from qserve.runtime.server.chat.reasoning import ReasoningTags
from qserve.runtime.server.chat.template_options import TemplateOptions
from qserve.runtime.server.chat.tool_use import ToolUse
from qserve.runtime.server.openai.hints import Label
from qserve.runtime.server.openai.protocol import MAX_MESSAGES, Delivery
from qserve.runtime.server.openai.strict import NotDone, Strict
from qserve.runtime.server.openai.tools import MAX_TOOLS, MODES, Function, Named, tool_use


class MessageTool(Function):
    """A tool that the client runs. ``eager_input_streaming`` changes nothing: arguments always stream."""

    not_done: ClassVar[NotDone] = {
        "allowed_callers": ([], ["direct"]),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, data: Any) -> Any:
        """Check the type before the fields, since tools that Anthropic's servers run have other fields."""
        if isinstance(data, dict) and data.get("type") not in (None, "custom"):
            raise PydanticCustomError("type", "must be 'custom'; no other tools are known here", {"param": "type"})
        return data


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise PydanticCustomError("name", "is for the type tool, which needs it", {"param": "name"})
        return self

    def choice(self) -> Any:
        if self.name is not None:
            return Named(self.name, "tool_choice.name")
        return MODES["required" if self.type == "any" else self.type]


class Thinking(Strict):
    """``budget_tokens`` is a hint; ``max_tokens`` bounds the reasoning and the answer together."""

    not_done: ClassVar[NotDone] = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)


class OutputFormat(Strict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # a hint
    format: OutputFormat | None = None


class Metadata(Strict):
    user_id: Label | None = None


class CountTokensRequest(Strict):
    """What makes the prompt of a message."""

    not_done: ClassVar[NotDone] = {
        "context_management": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: OptionalContent = None
    tools: list[MessageTool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def template_messages(self) -> list[dict[str, Any]]:
        """Raises ``APIError`` naming the block at fault."""
        turns = [] if self.system in (None, "", []) else [("system", read_blocks(self.system, "system", "system"))]
        for number, message in enumerate(self.messages):
            turns.append((message.role, read_blocks(message.content, message.role, f"messages[{number}].content")))
        return template_messages(turns)

    def template_options(self, tags: ReasoningTags | None, variables: Collection[str]) -> TemplateOptions:
        """``tags``: of the model's reasoning; ``variables``: of its chat template. As with Anthropic, a model that can
        leave out its reasoning does so unless it is asked for, and a last message of the assistant is continued."""
        if tags is None and self.thinking is not None and self.thinking.type == "enabled":
            raise RequestError("the chat template of this model marks no reasoning; leave it out", "thinking")
        thinking = self.thinking is not None and self.thinking.type != "disabled"
        given = {"enable_thinking": thinking} if tags is not None and "enable_thinking" in variables else {}
        begun = self.messages[-1].role == "assistant"
        return TemplateOptions(add_generation_prompt=not begun, continue_final_message=begun, variables=given)

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice
        parallel = choice is None or not choice.disable_parallel_tool_use
        return tool_use(self.tools or (), choice.choice() if choice else None, parallel)

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        return SamplingParams(constraint=self.constraint())

    def constraint(self) -> Constraint | None:
        format = self.output_config.format if self.output_config else None
        if format is None:
            return None
        return Constraint("json_schema", json.dumps(format.json_schema), "output_config.format.schema")

    def name_of(self, param: str | None) -> str | None:
        """The name in this request of the field that is ``param`` elsewhere."""
        names = {"prompt": "messages", "continue_final_message": "messages", "stop": "stop_sequences"}
        return names.get(param or "", param)


class MessageRequest(CountTokensRequest):
    not_done: ClassVar[NotDone] = {
        **CountTokensRequest.not_done,
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
    }

    max_tokens: int
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # a hint: there is one
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        names = ("temperature", "top_k", "top_p")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given |= {"max_tokens": self.max_tokens, "stop": self.stop_sequences or (), "constraint": self.constraint()}
        return SamplingParams(**dict(defaults) | given)

    def delivery(self) -> Delivery:
        return {"stream": bool(self.stream), "include_usage": True, "continuous_usage": False}
