"""``tool_constraint``: the grammar that holds an output to calls of given tools, in a model's own format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qserve.runtime.constraint import Constraint
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.argument_schema import alternatives, resolved, types_of
from qserve.runtime.server.chat.block_formats import BlockFormat
from qserve.runtime.server.chat.lark import Rules, json_rule, literal
from qserve.runtime.server.chat.reasoning import ReasoningTags
from qserve.runtime.server.chat.tool_formats import ARGS, ToolFormat
from qserve.runtime.server.chat.tool_use import OfferedTool

# What a schema may say of a string that is written as bare text, and of an object whose members are.
_OF_TEXT = frozenset({"type", "title", "description", "default", "examples"})
_OF_CALL = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}
)


@dataclass(frozen=True)
class _Bare:
    """How a call is written whose values are bare text: what comes before, around and after them. ``{}``: a name.
    ``loose``: models differ in whether they break lines."""

    head: str
    key: str
    end: str
    close: str
    loose: bool = False


_BARE = {
    "qwen3_coder": _Bare("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>", "</function>\n</tool_call>"),
    "seed_oss": _Bare("\n<function={}>\n", "<parameter={}>", "</parameter>", "</function>\n</seed:tool_call>"),
    "minimax_m2": _Bare(
        '\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>", "</invoke>\n</minimax:tool_call>"
    ),
    "glm": _Bare("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>", loose=True),
}


def can_be_forced(format: ToolFormat | BlockFormat) -> bool:
    return isinstance(format, ToolFormat) or format.name in ("deepseek", "kimi_k2") or format.name in _BARE


def tool_constraint(
    format: ToolFormat | BlockFormat,
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

    Raises ``RequestError`` where the format cannot hold calls to the schema of a strict tool.
    """
    grammar = _Grammar(format, tools, token_of)
    start = grammar.required(parallel) if required else grammar.free(parallel, reasoning)
    if reasoning is not None:
        start = f"{grammar.thought(reasoning, opened)} ({start})"
    return grammar.constraint(start)


class _Grammar(Rules):
    """The rules of one format."""

    def __init__(
        self,
        format: ToolFormat | BlockFormat,
        tools: Sequence[OfferedTool],
        token_of: Callable[[str], int | None],
    ) -> None:
        super().__init__(token_of)
        self._format = format
        for index, tool in enumerate(tools):
            self.append(f"tool_{index}: {self._call(index, tool)}")
        self.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))))

    def _call(self, index: int, tool: OfferedTool) -> str:
        """One call, without the markers that are the same for every tool."""
        format = self._format
        if format.name in _BARE:
            try:
                return self._bare_call(index, tool, _BARE[format.name])
            except (TypeError, AttributeError):  # such as properties that are a list
                raise RequestError(f"the parameters of {tool.name!r:.80} are no valid JSON schema", "tools") from None
        arguments = f"arguments_{index}"
        self.append(f"{arguments}: {json_rule(tool.parameters, tool.strict)}")
        if isinstance(format, BlockFormat) and format.name == "kimi_k2":
            return f'{literal(f"functions.{tool.name}:")} /[0-9]+/ {self.marker(format.inside[0])} {arguments}'
        if isinstance(format, BlockFormat):  # DeepSeek: of V3.1, and of V3
            separator, name = self.marker("<｜tool▁sep｜>"), literal(tool.name)
            fenced = literal(f"{tool.name}\n```json\n")
            return f'{name} {separator} {arguments} | "function" {separator} {fenced} {arguments} "\\n```"'
        if format.layout == "named":
            return f"{literal(tool.name)} {self.marker(ARGS)} {arguments}"
        name = json.dumps(tool.name, ensure_ascii=False)
        head = literal(f'{{"name": {name}, "{format.arguments}": ')
        return f'{head} {arguments} "}}"'

    def _bare_call(self, index: int, tool: OfferedTool, bare: _Bare) -> str:
        """The arguments in the order of the schema. A value is text up to its end, or JSON if it can be no string."""
        root = tool.parameters
        properties = root.get("properties") or {}
        required = root.get("required") or ()
        if tool.strict and (root.keys() - _OF_CALL or not set(required) <= properties.keys()):
            raise self._refused(tool.name, "more than properties and which of them are required")
        if tool.strict and '"$ref": "#"' in json.dumps(root):  # in the grammar of one value that is another root
            raise self._refused(tool.name, "a value is like the whole")
        parts = [self._marked(_named(bare.head, tool.name))]
        for number, (key, given) in enumerate(properties.items()):
            rule, schema = f"tool_{index}_{number}", resolved(given, root)
            choices = alternatives(schema, root)
            words = [_words(choice) for choice in choices]
            if any(_is_text(choice) for choice, known in zip(choices, words) if not known):
                if tool.strict and not all("type" in choice and choice.keys() <= _OF_TEXT for choice in choices):
                    raise self._refused(f"{tool.name}.{key}", "more than that a text is a string")
                self.text_until(f"{rule}_value", bare.end)
                value = f"{rule}_value"
            else:
                shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
                values = [word for known in words for word in map(literal, known)]
                values += [
                    json_rule({**choice, **shared}, tool.strict) for choice, known in zip(choices, words) if not known
                ]
                value = f"({' | '.join(values)}) {self.marker(bare.end)}"
            self.append(f"{rule}: {self._marked(_named(bare.key, key))} {value} {self._marked(chr(10))}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join([*parts, self._marked(bare.close)])

    def _refused(self, name: str, what: str) -> RequestError:
        return RequestError(
            f"calls in the format {self._format.name} are bare text, which cannot be held to what the schema of "
            f"{name!r:.80} says: {what}; leave strict out",
            "tools",
        )

    def _frame(self, parallel: bool) -> tuple[str, str, str | None]:
        """The marker that calls begin with, what follows it, and what is between two of these; None where all calls
        follow one marker."""
        format = self._format
        match format:
            case ToolFormat(layout="tagged"):
                return format.begin, f'"\\n" tool "\\n" {self.marker(format.end)}', '"\\n"'
            case ToolFormat(layout="list"):
                return format.begin, '" "? "[" ' + self._several("tool", '"," " "?', parallel) + ' "]"', None
            case BlockFormat(name="deepseek" | "kimi_k2"):
                call = f"{self.marker(format.begin)} tool {self.marker(format.end)}"
                begin, end = format.around
                return begin, self._several(call, '"\\n"?', parallel) + f" {self.marker(end)}", None
            case BlockFormat():
                return format.begin, "tool", self._marked("\n")
        return format.begin, "tool", ""

    def required(self, parallel: bool) -> str:
        if isinstance(self._format, ToolFormat) and self._format.layout == "bare":
            # The model never learned a marker that is not a token of its tokenizer.
            begin = f"({self.marker(self._format.begin)})?" if self._token_of(self._format.begin) is not None else ""
            return f"{begin} " + self._several("tool", '";" " "?', parallel)
        begin, inside, separator = self._frame(parallel)
        return self._several(
            f"{self.marker(begin)} {inside}", separator or "", parallel and separator is not None
        )

    def free(self, parallel: bool, reasoning: ReasoningTags | None) -> str:
        if isinstance(self._format, ToolFormat) and self._format.layout == "bare":
            # A thought must not match as plain text: then the call after it would match as plain text too.
            thought = "" if reasoning is None else rf" & ~/\s*{re.escape(reasoning.begin)}(.|\n)*/"
            self.append(rf"PLAIN: /\s*[^{{\s](.|\n)*/{thought}")
            return f"({self.required(parallel)} | PLAIN)?"
        begin, inside, separator = self._frame(parallel)
        self.text_until("lead", begin)
        return f"TEXT | (lead {inside}){'+' if parallel and separator is not None else ''}"

    def thought(self, tags: ReasoningTags, opened: bool) -> str:
        self.text_until("thought", tags.end)
        self.append(r"GAP: /\n{0,2}/")
        return "thought GAP" if opened else f"({self.marker(tags.begin)} thought GAP)?"

    def _several(self, call: str, separator: str, parallel: bool) -> str:
        return f"{call} ({separator} {call})*" if parallel else call

    def _marked(self, text: str) -> str:
        """A text with markers of the format in it."""
        markers = "|".join(re.escape(marker) for marker in self._format.markers)
        pieces = [piece for piece in re.split(rf"({markers}|\n)", text) if piece]
        bare = _BARE.get(self._format.name)
        loose = bare is not None and bare.loose
        return " ".join('"\\n"?' if loose and piece == "\n" else self.marker(piece) for piece in pieces)


def _named(text: str, name: str) -> str:
    if not name or set(name) & set('<>\n"' if '"' in text else "<>\n"):
        raise RequestError(f"the name {name!r:.80} cannot be written as the model writes calls", "tools")
    return text.replace("{}", name)


def _words(schema: Mapping[str, Any]) -> list[str]:
    """The strings that a schema allows, where it allows these and nothing else."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return list(values) if values and all(isinstance(value, str) for value in values) else []


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether any string may be a value of the schema, as far as it says so itself."""
    types = types_of(schema)
    return "string" in types or not (types or "enum" in schema or "const" in schema)
