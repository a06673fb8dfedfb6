"""``tool_constraint``: the grammar that holds an output to calls of given tools, in a model's own format.

Knows the Lark dialect of llguidance as text; does not compile it. Schemas are embedded as ``%json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from qserve.runtime.constraint import Constraint
from qserve.runtime.server.reasoning import ReasoningTags
from qserve.runtime.server.tool_formats import ARGS, ToolFormat
from qserve.runtime.server.tools import OfferedTool

_TEXT = r"/(.|\n)*/"
# As models are trained to write JSON. Free white space would let a weak model write it until its tokens are spent.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_constraint(
    format: ToolFormat,
    tools: Sequence[OfferedTool],
    special: Callable[[str], int | None],
    *,
    required: bool,
    parallel: bool,
    reasoning: ReasoningTags | None = None,
    opened: bool = False,
) -> Constraint:
    """What an output of calls looks like.

    Args:
        special: the id of a text that is a special token of the tokenizer, None for others: only such a token can
            stand for it, and only in a grammar that names it by its id.
        required: there must be a call; otherwise any text may stand before calls or instead of them.
        parallel: there may be several calls.
        reasoning: these tags may come first; they must where ``opened``, since the prompt ends inside them.
    """
    grammar = _Grammar(format, tools, special)
    start = grammar.required(parallel) if required else grammar.free(parallel)
    if reasoning is not None:
        start = f"{grammar.thought(reasoning, opened)} ({start})"
    return Constraint("lark", "\n".join([f"start: {start}", *grammar.rules]) + "\n", "tools")


class _Grammar:
    """Collects rules; its methods return expressions."""

    def __init__(
        self, format: ToolFormat, tools: Sequence[OfferedTool], special: Callable[[str], int | None]
    ) -> None:
        self._format = format
        self._special = special
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
                # A marker that is no special token of this tokenizer was never learned.
                begin = f"({begin})?" if self._special(self._format.begin) is not None else ""
                return f"{begin} " + self._several("tool", '";" " "?', parallel)
            case "tagged":
                return self._several(f"{begin} {self._tagged()}", '"\\n"', parallel)
            case "list":
                return f"{begin} {self._listed(parallel)}"
            case "named":
                return self._several(f"{begin} tool", "", parallel)

    def free(self, parallel: bool) -> str:
        if self._format.layout == "bare":
            self.rules.append(r"PLAIN: /\s*[^{\s](.|\n)*/")
            return f"({self.required(parallel)} | PLAIN)?"
        inside = {"tagged": self._tagged(), "named": "tool"}.get(self._format.layout) or self._listed(parallel)
        if self._special(self._format.begin) is None:
            # Lazy: as soon as the marker stands there, what comes next must be a call.
            self.rules.append(f"lead[lazy]: TEXT {_literal(self._format.begin)}")
        else:
            self.rules.append(f"lead: TEXT {self._marker(self._format.begin)}")
        several = parallel and self._format.layout != "list"
        return f"TEXT | (lead {inside}){'+' if several else ''}"

    def thought(self, tags: ReasoningTags, opened: bool) -> str:
        if self._special(tags.end) is None:
            self.rules.append(f"thought[lazy]: TEXT {_literal(tags.end)}")
        else:
            self.rules.append(f"thought: TEXT {self._marker(tags.end)}")
        self.rules.append(r"GAP: /\n{0,2}/")
        return "thought GAP" if opened else f"({self._marker(tags.begin)} thought GAP)?"

    def _tagged(self) -> str:
        return f'"\\n" tool "\\n" {self._marker(self._format.end)}'

    def _listed(self, parallel: bool) -> str:
        return '"[" ' + self._several("tool", '"," " "?', parallel) + ' "]"'

    def _several(self, call: str, separator: str, parallel: bool) -> str:
        return f"{call} ({separator} {call})*" if parallel else call

    def _marker(self, text: str) -> str:
        token = self._special(text)
        return _literal(text) if token is None else f"<[{token}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
