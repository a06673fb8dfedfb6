"""``harmony_constraint``: the grammar that holds answers of GPT-OSS to calls of given tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from qserve.runtime.constraint import Constraint
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.lark import Rules, json_rule, literal
from qserve.runtime.server.chat.tool_use import OfferedTool


def harmony_constraint(
    tools: Sequence[OfferedTool], token_of: Callable[[str], int | None], *, required: bool
) -> Constraint:
    """The constraint of an output that follows ``<|start|>assistant``: messages of analysis and commentary, then a
    call, or the final message unless a call is ``required``. The model ends its answer after one call.

    Raises ``RequestError`` where a function's name cannot be written.
    """
    rules = Rules(token_of)
    channel, message, constrain = map(rules.marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    form = f'(" " ({constrain})? "json")? {message}'
    for index, tool in enumerate(tools):
        if re.search(r"\s|<\|", tool.name):
            raise RequestError(f"the name {tool.name!r:.80} cannot be written as the model writes calls", "tools")
        recipient = literal(f" to=functions.{tool.name}")
        head = f'({channel} "commentary" {recipient} | {recipient} {channel} "commentary")'
        rules.append(f"tool_{index}: {head} {form} {json_rule(tool.parameters, tool.strict)}")
    rules.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))))
    rules.text_until("words", "<|end|>")
    before = f'({channel} ("analysis" | "commentary") {message} words {rules.marker("<|start|>")} "assistant")*'
    final = "" if required else f' | {channel} "final" {message} TEXT'
    return rules.constraint(f"{before} (tool{final})")
