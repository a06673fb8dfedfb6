"""``BlockFormat``: tool calls that stand whole between two markers, and are not the JSON of ``ToolFormat``.

One table; a row is a pair of markers and a function that reads what is between them. The layouts follow the chat
templates of the models and their documentation.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qserve.runtime.server.chat.argument_schema import Schemas, schema_of, typed

Call = tuple[str, dict[str, Any]]
Reader = Callable[[str, Schemas], list[Call]]


@dataclass(frozen=True)
class BlockFormat:
    """One row of the table.

    Attributes:
        name: what ``ServerConfig.tool_format`` calls it.
        begin, end: the markers around a block.
        read: the calls of a block. Raises ``ValueError`` where it holds no calls.
        signs: a template that contains one of these texts, and none of ``other``, is of this format.
        other: signs of formats that share a marker with this one.
        around: markers around several blocks; they say nothing and are dropped.
        inside: markers within a block.
        ends_itself: what is between the markers shows that it is complete, so the end marker may be missing.
        bare: an answer that begins with a bracket is a block without markers.
        header: the marker behind the id of a call, where the model writes one that its template shows it again.
    """

    name: str
    begin: str
    end: str
    read: Reader
    signs: tuple[str, ...]
    other: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    ends_itself: bool = True
    bare: bool = False
    header: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that an output must show even where they are special tokens of the tokenizer."""
        return (self.begin, self.end, *self.around, *self.inside)

    def call_id(self, block: str) -> str:
        """Of the call in ``block``."""
        return block.partition(self.header)[0].strip() if self.header else f"call_{secrets.token_hex(12)}"


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_INVOKE = re.compile(r'\s*name="([^"\n]+)"\s*>(.*)', re.DOTALL)
_DSML = re.compile(
    r'\s*<｜DSML｜parameter name="([^"\n]+)"(?: string="(\w+)")?>(.*?)</｜DSML｜parameter>\s*', re.DOTALL
)
_XML_INVOKE = re.compile(r'\s*<invoke name="([^"\n]+)">(.*?)</invoke>\s*', re.DOTALL)
_XML_PARAMETER = re.compile(r'\s*<parameter name="([^"\n]+)">(.*?)</parameter>\s*', re.DOTALL)
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"\s*functions\.(.+):\d+\s*")
_CALL = re.compile(r"\s*call:([^{\s]+)\s*(?=\{)")
_BARE_WORD = re.compile(r"[^,{}\[\]]+")


def _read_xml(block: str, schemas: Schemas) -> list[Call]:
    """``<function=name>`` and ``<parameter=key>value</parameter>``; a line break on either side is not the value's."""
    found = _FUNCTION.fullmatch(block)
    if found is None:
        raise ValueError("no function")
    name = found[1].strip()
    pairs = _pairs(_PARAMETER, found[2])
    return [(name, {key: typed(_unwrapped(text), schema_of(schemas, name, key)) for key, text in pairs})]


def _read_keys(block: str, schemas: Schemas) -> list[Call]:
    """The name, then ``<arg_key>`` and ``<arg_value>`` in turns."""
    name, mark, rest = block.partition("<arg_key>")
    pairs = _pairs(_KEY, mark + rest)
    return [(name.strip(), {key: typed(text, schema_of(schemas, name.strip(), key)) for key, text in pairs})]


def _read_deepseek(block: str, schemas: Schemas) -> list[Call]:
    """V3.1: the name and the arguments. V3 and R1: a type, the name on a line, the arguments in a fence."""
    name, separator, rest = block.partition("<｜tool▁sep｜>")
    if not separator:
        raise ValueError("no separator")
    if not rest.lstrip().startswith("{"):
        name, _, rest = rest.partition("\n")
        rest = rest.strip()
        if not rest.startswith("```"):
            raise ValueError("no arguments")
        rest = rest.removeprefix("```").removeprefix("json").removesuffix("```")
    return [(name.strip(), _object(rest))]


def _read_dsml(block: str, schemas: Schemas) -> list[Call]:
    """DeepSeek V3.2: parameters that say themselves whether they are strings or JSON."""
    found = _INVOKE.fullmatch(block)
    if found is None:
        raise ValueError("no name")
    arguments: dict[str, Any] = {}
    for key, string, text in _matches(_DSML, found[2]):
        kind = {"true": {"type": "string"}, "false": {}}.get(string)
        arguments[key] = typed(text, schema_of(schemas, found[1], key) if kind is None else kind)
    return [(found[1], arguments)]


def _read_minimax(block: str, schemas: Schemas) -> list[Call]:
    """MiniMax M2: calls as XML, of which one block may hold several."""
    return [
        (name, {key: typed(text, schema_of(schemas, name, key)) for key, text in _matches(_XML_PARAMETER, inside)})
        for name, inside in _matches(_XML_INVOKE, block)
    ]


def _read_kimi(block: str, schemas: Schemas) -> list[Call]:
    """Kimi K2: ``functions.name:number``, the id of the call, then the arguments."""
    head, separator, arguments = block.partition(_KIMI_ARGUMENTS)
    found = _KIMI_ID.fullmatch(head)
    if found is None or not separator:
        raise ValueError("no id")
    return [(found[1], _object(arguments))]


def _read_cohere(block: str, schemas: Schemas) -> list[Call]:
    """Command R7B and A: a list of objects with ``tool_name`` and ``parameters``."""
    try:
        calls = json.loads(block)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    read: list[Call] = []
    for call in calls if isinstance(calls, list) else [calls]:
        name, given = (call.get("tool_name"), call.get("parameters")) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(given, dict):
            raise ValueError("no call")
        read.append((name, given))
    return read


def _read_python(block: str, schemas: Schemas) -> list[Call]:
    """A call of Python, or a list of calls, with named arguments that are literals. Nothing is run."""
    try:
        tree = ast.parse(block.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        read: list[Call] = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
                raise ValueError("not a call with named arguments")
            values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            read.append((ast.unparse(call.func), values))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not Python: {error}") from None
    return read


def _read_gemma(quote: str) -> Reader:
    """``call:name{key:value}``: keys are bare, strings stand between two ``quote``."""

    def read(block: str, schemas: Schemas) -> list[Call]:
        found = _CALL.match(block)
        if found is None:
            raise ValueError("no name")
        try:
            value, end = _gemma_value(block, found.end(), quote)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if block[end:].strip() or not isinstance(value, dict):
            raise ValueError("text after the arguments")
        return [(found[1], value)]

    return read


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The value that begins at ``at``, and where it ends."""
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    opening = text[at : at + 1]
    if opening not in ("{", "["):
        found = _BARE_WORD.match(text, at)
        if found is None:
            raise ValueError("no value")
        return typed(found[0].strip(), {}), found.end()
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    at += 1
    closing = "}" if opening == "{" else "]"
    while not text.startswith(closing, at):
        if items or pairs:
            if not text.startswith(",", at):
                raise ValueError("no comma")
            at += 1
        if opening == "[":
            value, at = _gemma_value(text, at, quote)
            items.append(value)
            continue
        if text.startswith(quote, at):
            key, at = _gemma_value(text, at, quote)
        else:
            colon = text.index(":", at)
            key, at = text[at:colon].strip(), colon
        if not text.startswith(":", at):
            raise ValueError("no colon")
        pairs[str(key)], at = _gemma_value(text, at + 1, quote)
    return (pairs if opening == "{" else items), at + 1


BLOCK_FORMATS: tuple[BlockFormat, ...] = (
    BlockFormat("seed_oss", "<seed:tool_call>", "</seed:tool_call>", _read_xml, ("<seed:tool_call>",)),
    BlockFormat("qwen3_coder", "<tool_call>", "</tool_call>", _read_xml, ("<parameter=",)),
    BlockFormat(
        "glm", "<tool_call>", "</tool_call>", _read_keys, ("<arg_key>",),
        inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), ends_itself=False,
    ),
    BlockFormat(
        "deepseek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _read_deepseek, ("<｜tool▁call▁begin｜>",),
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), inside=("<｜tool▁sep｜>",),
    ),
    BlockFormat(
        "deepseek_v32", "<｜DSML｜invoke", "</｜DSML｜invoke>", _read_dsml, ("｜DSML｜",),
        around=tuple(f"<{slash}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for slash in ("", "/")),
        inside=("｜DSML｜",), ends_itself=False,
    ),
    BlockFormat(
        "minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>", _read_minimax, ("<minimax:tool_call>",)
    ),
    BlockFormat(
        "kimi_k2", "<|tool_call_begin|>", "<|tool_call_end|>", _read_kimi, ("<|tool_calls_section_begin|>",),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), inside=(_KIMI_ARGUMENTS,),
        header=_KIMI_ARGUMENTS,
    ),
    BlockFormat("cohere", "<|START_ACTION|>", "<|END_ACTION|>", _read_cohere, ("<|START_ACTION|>",)),
    BlockFormat(
        "gemma4", "<|tool_call>", "<tool_call|>", _read_gemma('<|"|>'), ("<|tool_call>",), inside=('<|"|>',)
    ),
    BlockFormat(
        "functiongemma", "<start_function_call>", "<end_function_call>", _read_gemma("<escape>"),
        ("<start_function_call>",), inside=("<escape>",),
    ),
    BlockFormat("gemma3", "```tool_code", "```", _read_python, ("```tool_code",)),
    BlockFormat(
        "pythonic", "<|python_start|>", "<|python_end|>", _read_python,
        ("[func_name1(", "<|python_start|>"), bare=True,
    ),
)


def _matches(pattern: re.Pattern[str], text: str) -> list[tuple[str, ...]]:
    """The groups of ``pattern`` repeated over the whole of ``text``."""
    at, found = 0, []
    while text[at:].strip():
        match = pattern.match(text, at)
        if match is None:
            raise ValueError("text between arguments")
        found.append(tuple(match.groups(default="")))
        at = match.end()
    return found


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    return [(key.strip(), value) for key, value in _matches(pattern, text)]


def _unwrapped(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value
