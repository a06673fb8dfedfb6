"""``preprocess``: turns a chat request into the engine's inputs and a parser for the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.chat.block_formats import BlockFormat
from qserve.runtime.server.chat.block_parser import BlockParser
from qserve.runtime.server.chat.dialect import AnswerParser, Dialect, OutputParser
from qserve.runtime.server.chat.harmony import FINAL, HarmonyParser
from qserve.runtime.server.chat.harmony_grammar import harmony_constraint
from qserve.runtime.server.chat.prompts import PromptEncoder
from qserve.runtime.server.chat.reasoning import ReasoningParser
from qserve.runtime.server.chat.template_options import DEFAULT_OPTIONS, TemplateOptions
from qserve.runtime.server.chat.tool_grammar import can_be_forced, tool_constraint
from qserve.runtime.server.chat.tool_parser import ToolParser
from qserve.runtime.server.chat.tool_use import ToolUse


@dataclass(frozen=True)
class ChatInputs:
    """``parser`` makes a parser for the text of one choice; None where the text is the answer as it is."""

    prompt: list[int]
    params: SamplingParams
    parser: Callable[[], AnswerParser] | None


def preprocess(
    encoder: PromptEncoder,
    dialect: Dialect,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    use: ToolUse,
    options: TemplateOptions = DEFAULT_OPTIONS,
) -> ChatInputs:
    """The prompt of a chat, what its answer is held to, and how it is read.

    Raises ``RequestError`` where the model cannot do what is asked.
    """
    _require_possible(dialect, params, use)
    prompt = encoder.chat(
        messages, [tool.for_template() for tool in use.shown], options, params.num_prompt_kept(encoder.max_model_len)
    )
    if dialect.harmony:
        return _with_channels(encoder, dialect, prompt, params, use, options)
    continued = messages[-1] if options.continue_final_message else None
    return _with_tags(encoder, dialect, prompt, params, use, continued)


def _require_possible(dialect: Dialect, params: SamplingParams, use: ToolUse) -> None:
    if use.callable and not dialect.takes_tools:
        raise RequestError(
            "the chat template of this model is of no known format of tool calls; choose one with --tool-format",
            "tools",
        )
    if params.constraint is not None and use.constrained:
        raise RequestError("an answer cannot be held to response_format and to tool calls at once", "tool_choice")
    if _is_held(use) and dialect.tools is not None and not can_be_forced(dialect.tools):
        raise RequestError(
            f"calls in the format {dialect.tools.name} cannot be forced or held to a schema; leave tool_choice at "
            "auto, and strict out",
            "tool_choice" if use.required else "tools",
        )


def _is_held(use: ToolUse) -> bool:
    """Whether calls are held to their schemas, or there must be one."""
    return use.required or any(tool.strict for tool in use.callable)


def _with_channels(
    encoder: PromptEncoder,
    dialect: Dialect,
    prompt: list[int],
    params: SamplingParams,
    use: ToolUse,
    options: TemplateOptions,
) -> ChatInputs:
    """For a model whose messages have channels."""
    if params.constraint is not None:
        if options.add_generation_prompt:  # the constraint is for the answer, not for the messages before it
            kept = params.num_prompt_kept(encoder.max_model_len)
            prompt = [*prompt, *encoder.encode(FINAL, add_special_tokens=False)][-(kept or 0) :]
        return ChatInputs(prompt, params, None)
    params = replace(params, visible_tokens=dialect.visible_tokens(tools=False, reasoning=False))
    if _is_held(use):
        constraint = harmony_constraint(use.callable, dialect.token_of, required=use.required)
        params = replace(params, constraint=constraint)
    parser = partial(
        HarmonyParser,
        _schemas(use),
        _max_calls(use),
        shows_reasoning=dialect.shows_reasoning,
        opened=options.continue_final_message,
    )
    return ChatInputs(prompt, params, parser)


def _with_tags(
    encoder: PromptEncoder,
    dialect: Dialect,
    prompt: list[int],
    params: SamplingParams,
    use: ToolUse,
    continued: Mapping[str, Any] | None,
) -> ChatInputs:
    """For a model that marks calls and reasoning in its text. ``continued``: the message that the answer goes on."""
    # Whatever the prompt says, an answer that is held to a format has no room for reasoning.
    tags = dialect.reasoning if params.constraint is None else None
    opened = tags is not None and (
        encoder.tail(prompt).rstrip().endswith(tags.begin)
        or (continued is not None and tags.are_open(continued["content"]))
    )
    format = dialect.tools if use.callable else None
    params = replace(
        params, visible_tokens=dialect.visible_tokens(tools=format is not None, reasoning=tags is not None)
    )
    # One call at most is a matter of the parser where a grammar would allow less than the model may write.
    if format is not None and (_is_held(use) if isinstance(format, BlockFormat) else use.constrained):
        constraint = tool_constraint(
            format,
            use.callable,
            dialect.token_of,
            required=use.required,
            parallel=use.parallel,
            reasoning=tags,
            opened=opened,
        )
        params = replace(params, constraint=constraint)

    def parser() -> OutputParser:
        tools: ToolParser | BlockParser | None = None
        if isinstance(format, BlockFormat):
            tools = BlockParser(format, _schemas(use), _max_calls(use))
        elif format is not None:
            tools = ToolParser(format, _schemas(use), _max_calls(use))
        return OutputParser(None if tags is None else ReasoningParser(tags, opened), tools)

    return ChatInputs(prompt, params, None if tags is None and format is None else parser)


def _schemas(use: ToolUse) -> dict[str, Any]:
    return {tool.name: tool.parameters for tool in use.callable}


def _max_calls(use: ToolUse) -> int | None:
    return None if use.parallel else 1
