"""The requests of ``/v1/completions`` and ``/v1/chat/completions``, as pydantic models.

Sampling fields and their bounds are those of ``SamplingParams``. A field that OpenAI or vLLM has and this server does
not support is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

from pydantic import Field, ValidationError, create_model, field_validator
from pydantic_core import PydanticCustomError

from qserve.runtime.sampling import (
    MAX_CHOICES,
    NUMBERS,
    OF_DRAWS,
    REQUEST_FIELDS,
    SWITCHES,
    Defaults,
    RequestError,
    SamplingParams,
)
from qserve.runtime.server.chat.template_options import TemplateOptions
from qserve.runtime.server.chat.tool_use import ToolUse
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.openai.hints import Hints, ReasoningEffort, Verbosity
from qserve.runtime.server.openai.messages import Message
from qserve.runtime.server.openai.strict import NotDone, Strict
from qserve.runtime.server.openai.structured_outputs import StructuredFields
from qserve.runtime.server.openai.tools import MAX_TOOLS, Tool, chat_choice, tool_use

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096


class StreamOptions(Strict):
    not_done: ClassVar[NotDone] = {"include_obfuscation": (False,)}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Delivery(TypedDict):
    """How an answer is sent. ``continuous_usage``: every chunk tells the usage so far."""

    stream: bool
    include_usage: bool
    continuous_usage: bool


if TYPE_CHECKING:

    class _Sampled(Strict):
        """Fields handed to ``SamplingParams`` under their own name; null means its default."""

        n: int | None
        max_tokens: int | None
        prompt_logprobs: int | None
        use_beam_search: bool | None

else:
    _KINDS = {name: number.kind for name, number in NUMBERS.items()} | dict.fromkeys(SWITCHES, bool)
    _PLAIN = {name: (_KINDS[name] | None, None) for name in REQUEST_FIELDS if name in _KINDS}
    _Sampled = create_model("_Sampled", __base__=Strict, **_PLAIN)


class _GenerationRequest(_Sampled, StructuredFields):
    """What both kinds of request share. ``user`` and ``safety_identifier`` change nothing."""

    not_done: ClassVar[NotDone] = {
        "kv_transfer_params": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "vllm_xargs": ({},),
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: int | None = None

    stop: Any = None
    stop_token_ids: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logit_bias: dict[str, Any] | None = None

    def delivery(self) -> Delivery:
        options = self.stream_options or StreamOptions()
        usage = bool(options.include_usage)
        continuous = usage and bool(options.continuous_usage_stats)  # as in other servers, it needs include_usage too
        return {"stream": bool(self.stream), "include_usage": usage, "continuous_usage": continuous}

    def _params(self, defaults: Defaults, **more: Any) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for requests with stream true", "stream_options")
        for name in ("use_beam_search", "prompt_logprobs"):
            if self.stream and getattr(self, name) not in (None, False):
                raise RequestError(f"{name} is for requests without stream", name)
        given = {name: value for name in REQUEST_FIELDS if (value := getattr(self, name)) is not None}
        usual = {name: value for name, value in defaults.items() if not (self.use_beam_search and name in OF_DRAWS)}
        return SamplingParams(**{"constraint": self.constraint()} | usual | given | more)


def prompt_list(value: Any) -> Any:
    """A text, texts, token ids or lists of token ids, as a list of texts or of lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "must be a string, a list of strings, token ids, or lists of those")
    if len(value) > MAX_PROMPTS and type(value[0]) is not int:  # before anything looks at each of them
        raise PydanticCustomError("prompt", f"holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed")
    kinds = set(map(type, value))
    if kinds == {int}:
        value, kinds = [value], {list}
    if not value or not all(value):
        raise PydanticCustomError("prompt", "must not be empty")
    texts = kinds == {str}
    if not texts and not (kinds == {list} and all(set(map(type, ids)) == {int} for ids in value)):
        raise PydanticCustomError("prompt", "must hold only strings, only token ids, or only lists of token ids")
    if not texts and min(map(min, value)) < 0:
        raise PydanticCustomError("prompt", f"holds the negative token id {min(map(min, value))}")
    return value


class CompletionRequest(_GenerationRequest):
    """``prompt`` becomes a list: of texts, or of lists of token ids."""

    not_done: ClassVar[NotDone] = {**_GenerationRequest.not_done, "add_special_tokens": (True,), "suffix": ()}

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)

    _prompts = field_validator("prompt")(prompt_list)

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Where ``best_of`` is more than ``n``, so many choices are generated, with logprobs to choose by."""
        logprobs = self.logprobs
        more: dict[str, Any] = {}
        if self.echo and logprobs is not None:
            more["prompt_logprobs"] = logprobs
        if more and (self.use_beam_search or self.prompt_logprobs is not None):
            raise RequestError("echo with logprobs goes with neither use_beam_search nor prompt_logprobs", "echo")
        if self.best_of is not None and self.best_of != (self.n or 1):
            if self.best_of < (self.n or 1) or self.stream or self.use_beam_search:
                raise RequestError("best_of must be at least n, without stream and use_beam_search", "best_of")
            logprobs, more["n"] = logprobs or 0, self.best_of
        return self._params(defaults, logprobs=logprobs, **more)


class TemplateFields(Strict):
    """How the messages of a conversation are rendered; ``chat_template_kwargs`` are variables of the chat template."""

    not_done: ClassVar[NotDone] = {"chat_template": ()}

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_options(self) -> TemplateOptions:
        """A last message that is continued is followed by no generation prompt."""
        continued = bool(self.continue_final_message)
        if continued and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        given = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        prompted = not continued if self.add_generation_prompt is None else self.add_generation_prompt
        return TemplateOptions(prompted, continued, given)


class ChatRequest(_GenerationRequest, TemplateFields, Hints):
    not_done: ClassVar[NotDone] = {
        **_GenerationRequest.not_done,
        **TemplateFields.not_done,
        "add_special_tokens": (False,),
        "audio": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "store": (False,),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None  # a hint, too
    verbosity: Verbosity | None = None

    _choice = field_validator("tool_choice")(chat_choice)

    def tool_use(self) -> ToolUse:
        return tool_use([tool.function for tool in self.tools or ()], self.tool_choice, self.parallel_tool_calls)

    @property
    def limit(self) -> int | None:
        """Output tokens at most, None where it does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError("max_tokens and max_completion_tokens differ; give one", "max_tokens")
        limit = defaults.get("max_tokens") if self.limit is None else self.limit
        return self._params(defaults, max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def name_of(self, param: str | None) -> str | None:
        """The name in this request of the field that is ``param`` elsewhere."""
        if param == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs"}.get(param or "", param)


R = TypeVar("R", bound=Strict)


def parse(kind: type[R], content: Any, within: str = "") -> R:
    """Validate a body, or the part of one that is at ``within``. Raises ``APIError`` 400 naming the first bad field."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    inner = first.get("ctx", {}).get("param")  # set where a check of the whole body found one field at fault
    where = [*first["loc"], *([] if inner is None else [inner])]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    param = (within + path).lstrip(".")[:200]
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}.get(first["type"])
    message = {
        "extra_forbidden": f"unknown parameter: '{param}'",
        "missing": f"missing required parameter: '{param}'",
        "unsupported_parameter": f"'{param}' is not supported by this server; leave it out",
    }.get(first["type"], f"{param}: {first['msg']}")
    raise APIError(400, message, param=param, code=code or "invalid_value")
