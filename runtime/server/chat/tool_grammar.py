"""``tool_constraint``: the grammar that holds an output to calls of given tools, in a model's own format.

It is text in the Lark dialect of llguidance, which is compiled elsewhere. Schemas are embedded as ``%json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from qserve.runtime.constraint import Constraint
from qserve.runtime.server.chat.reasoning import ReasoningTags
from qserve.runtime.server.chat.tool_formats import ARGS, ToolFormat
from qserve.runtime.server.chat.tool_use import OfferedTool

_TEXT = r"/(.|\n)*/"
# The spacing that models are trained to write. With free white space a weak model writes it until its tokens are spent.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_constraint(
    format: ToolFormat,
    tools: Sequence[OfferedTool],
    token_of: Callable[[str], int | None],
    *,
    required: bool,
    parallel: bool,
    reasoning: ReasoningTags | None = None,
    opened: bool = False,
) -> Constraint:
    """The constraint of an output that calls tools.

    Args:
        token_of: the id of a text that is one of the tokenizer's added tokens, None for others. Where such a token is
            special or in angle brackets, llguidance does not match it by its text, so the rules name its id too.
        required: there must be a call; otherwise any text may stand before calls or instead of them.
        parallel: there may be several calls.
        reasoning: these tags may come first. Where ``opened`` they must: the prompt ends inside them.
    """
    grammar = _Grammar(format, tools, token_of)
    start = grammar.required(parallel) if required else grammar.free(parallel, reasoning)
    if reasoning is not None:
        start = f"{grammar.thought(reasoning, opened)} ({start})"
    return Constraint("lark", "\n".join([f"start: {start}", *grammar.rules]) + "\n", "tools")


class _Grammar:
    """Collects rules; its methods return expressions."""

    def __init__(
        self, format: ToolFormat, tools: Sequence[OfferedTool], token_of: Callable[[str], int | None]
    ) -> None:
        self._format = format
        self._token_of = token_of
        self.rules = [f"TEXT: {_TEXT}"]
        for index, tool in enumerate(tools):
            name = json.dumps(tool.name, ensure_ascii=False)
            schema = {**tool.parameters, "x-guidance": _SPACING | {"lenient": not tool.strict}}
            arguments = f"%json {json.dumps(schema, ensure_ascii=False)}"
            if format.layout == "named":
                self.rules.append(f"tool_{index}: {_literal(tool.name)} {self._marker(ARGS)} {arguments}")
            else:
                head = _literal(f'{{"name": {name}, "{format.arguments}": ')
                self.rules.append(f'tool_{index}: {head} {arguments} "}}"')
        self.rules.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))))

    def required(self, parallel: bool) -> str:
        begin = self._marker(self._format.begin)
        match self._format.layout:
            case "bare":
                # The model never learned a marker that is not a token of its tokenizer.
                begin = f"({begin})?" if self._token_of(self._format.begin) is not None else ""
                return f"{begin} " + self._several("tool", '";" " "?', parallel)
            case "tagged":
                return self._several(f"{begin} {self._tagged()}", '"\\n"', parallel)
            case "list":
                return f"{begin} {self._listed(parallel)}"
            case "named":
                return self._several(f"{begin} tool", "", parallel)

    def free(self, parallel: bool, reasoning: ReasoningTags | None) -> str:
        if self._format.layout == "bare":
            # A thought must not match as plain text: then the call after it would match as plain text too.
            thought = "" if reasoning is None else rf" & ~/\s*{re.escape(reasoning.begin)}(.|\n)*/"
            self.rules.append(rf"PLAIN: /\s*[^{{\s](.|\n)*/{thought}")
            return f"({self.required(parallel)} | PLAIN)?"
        inside = {"tagged": self._tagged(), "named": "tool"}.get(self._format.layout) or self._listed(parallel)
        self._text_until("lead", self._format.begin)
        several = parallel and self._format.layout != "list"
        return f"TEXT | (lead {inside}){'+' if several else ''}"

    def thought(self, tags: ReasoningTags, opened: bool) -> str:
        self._text_until("thought", tags.end)
        self.rules.append(r"GAP: /\n{0,2}/")
        return "thought GAP" if opened else f"({self._marker(tags.begin)} thought GAP)?"

    def _text_until(self, name: str, marker: str) -> None:
        """A rule for any text up to its first marker. It is lazy: after that marker the other rules must hold."""
        self.rules.append(f"{name}_text[lazy]: TEXT {_literal(marker)}")
        token = self._token_of(marker)
        self.rules.append(f"{name}: {name}_text" + ("" if token is None else f" | TEXT <[{token}]>"))

    def _tagged(self) -> str:
        return f'"\\n" tool "\\n" {self._marker(self._format.end)}'

    def _listed(self, parallel: bool) -> str:
        return '" "? "[" ' + self._several("tool", '"," " "?', parallel) + ' "]"'

    def _several(self, call: str, separator: str, parallel: bool) -> str:
        return f"{call} ({separator} {call})*" if parallel else call

    def _marker(self, text: str) -> str:
        token = self._token_of(text)
        return _literal(text) if token is None else f"({_literal(text)} | <[{token}]>)"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
