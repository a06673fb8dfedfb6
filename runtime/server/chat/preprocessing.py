"""``preprocess``: turns a chat request into the engine's inputs and a parser for the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.chat.dialect import Dialect, OutputParser
from qserve.runtime.server.chat.prompts import PromptEncoder
from qserve.runtime.server.chat.reasoning import ReasoningParser
from qserve.runtime.server.chat.template_options import DEFAULT_OPTIONS, TemplateOptions
from qserve.runtime.server.chat.tool_grammar import tool_constraint
from qserve.runtime.server.chat.tool_parser import ToolParser
from qserve.runtime.server.chat.tool_use import ToolUse


@dataclass(frozen=True)
class ChatInputs:
    """``parser`` makes a parser for the text of one choice; None where the text is the answer as it is."""

    prompt: list[int]
    params: SamplingParams
    parser: Callable[[], OutputParser] | None


def preprocess(
    encoder: PromptEncoder,
    dialect: Dialect,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    use: ToolUse,
    options: TemplateOptions = DEFAULT_OPTIONS,
) -> ChatInputs:
    """Raises ``RequestError`` where the model cannot do what is asked."""
    if use.callable and dialect.tools is None:
        raise RequestError(
            "the chat template of this model is of no known format of tool calls; choose one with --tool-format",
            "tools",
        )
    if params.constraint is not None and use.constrained:
        raise RequestError("an answer cannot be held to response_format and to tool calls at once", "tool_choice")
    kept = params.num_prompt_kept(encoder.max_model_len)
    prompt = encoder.chat(messages, [tool.for_template() for tool in use.shown], options, kept)
    # Whatever the prompt says, an answer that is held to a format has no room for reasoning.
    tags = dialect.reasoning if params.constraint is None else None
    opened = tags is not None and (
        encoder.tail(prompt).rstrip().endswith(tags.begin)
        or (options.continue_final_message and tags.are_open(messages[-1]["content"]))
    )
    format = dialect.tools if use.callable else None
    params = replace(
        params, visible_tokens=dialect.visible_tokens(tools=format is not None, reasoning=tags is not None)
    )
    if format is not None and use.constrained:
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
        names = [tool.name for tool in use.callable]
        return OutputParser(
            None if tags is None else ReasoningParser(tags, opened),
            None if format is None else ToolParser(format, names, None if use.parallel else 1),
        )

    return ChatInputs(prompt, params, None if tags is None and format is None else parser)
