"""The grammars of tool calls, compiled by llguidance and tried on texts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qserve.runtime.constraint import Constraint
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.block_formats import BlockFormat
from qserve.runtime.server.chat.block_parser import BlockParser
from qserve.runtime.server.chat.dialect import Dialect, OutputParser
from qserve.runtime.server.chat.harmony import MARKERS as HARMONY_MARKERS
from qserve.runtime.server.chat.harmony_grammar import harmony_constraint
from qserve.runtime.server.chat.reasoning import REASONING_TAGS, ReasoningTags
from qserve.runtime.server.chat.tool_formats import NAMES, TOOL_FORMATS, ToolFormat
from qserve.runtime.server.chat.tool_grammar import tool_constraint
from qserve.runtime.server.chat.tool_use import OfferedTool

from .test_dialects import ANALYSIS, BEFORE, CALL, FINAL, NOW, ONE, ROWS, SCHEMAS, block, read
from .test_tool_parser import parse, written

FORMATS = {row.name: row for row in TOOL_FORMATS}
BLOCKS = ("qwen3_coder", "seed_oss", "glm", "deepseek", "kimi_k2", "minimax_m2")
WEATHER = OfferedTool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
QUOTED = OfferedTool('say "hi" é', {"type": "object"})
GOOD = ("get_weather", {"city": "Zü}rich", "days": 3})
OTHER = ('say "hi" é', {"x": [1, {"y": None}]})


@pytest.fixture(scope="module", params=["text", "plain", "special"])
def tokenizer(request: pytest.FixtureRequest, tiny_model: Any) -> PreTrainedTokenizerBase:
    """Markers as mere text, as ordinary tokens (Qwen) and as special ones (Mistral)."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    if request.param == "text":
        return tokenizer
    special = request.param == "special"
    markers = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]
    markers += HARMONY_MARKERS
    markers += [marker for name in BLOCKS for marker in ROWS[name].markers if marker not in markers]
    tokenizer.add_tokens([AddedToken(marker, special=special) for marker in markers], special_tokens=special)
    return tokenizer


@pytest.fixture(scope="module")
def guide(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    return from_tokenizer(tokenizer)


class Checker:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, guide: LLTokenizer) -> None:
        self.tokenizer, self.guide = tokenizer, guide
        self.token_of = Dialect(tokenizer, "none", "none").token_of

    def constraint(self, row: ToolFormat | BlockFormat, tools: list[OfferedTool], **options: Any) -> Constraint:
        options = {"required": True, "parallel": True} | options
        return tool_constraint(row, tools, self.token_of, **options)

    def accepts(self, constraint: Constraint, text: str) -> bool:
        assert (constraint.kind, constraint.param) == ("lark", "tools")
        matcher = LLMatcher(self.guide, LLMatcher.grammar_from_lark(constraint.text))
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def checker(tokenizer: PreTrainedTokenizerBase, guide: LLTokenizer) -> Checker:
    return Checker(tokenizer, guide)


@pytest.mark.parametrize("name", NAMES)
def test_required(checker: Checker, name: str) -> None:
    row = FORMATS[name]
    grammar = checker.constraint(row, [WEATHER, QUOTED])
    for calls in ([GOOD], [OTHER], [GOOD, OTHER, GOOD]):
        text = written(row, calls)
        assert checker.accepts(grammar, text)
        assert len(parse(row, [text])[2]) == len(calls)
    for text in (
        "",
        "It rains.",
        "It rains. " + written(row, [GOOD]),
        written(row, [("unheard_of", {})]),
        written(row, [("get_weather", {})]),
        written(row, [("get_weather", {"city": 3})]),
        written(row, [("get_weather", {"city": "a", "x": 1})]),
        written(row, [GOOD])[:-1],
    ):
        assert not checker.accepts(grammar, text)


@pytest.mark.parametrize("name", NAMES)
def test_named_and_exactly_one(checker: Checker, name: str) -> None:
    row = FORMATS[name]
    named = checker.constraint(row, [WEATHER])
    assert checker.accepts(named, written(row, [GOOD, GOOD]))
    assert not checker.accepts(named, written(row, [OTHER]))
    one = checker.constraint(row, [WEATHER, QUOTED], parallel=False)
    assert checker.accepts(one, written(row, [OTHER]))
    assert not checker.accepts(one, written(row, [GOOD, GOOD]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parallel", [False, True])
def test_free_text_or_calls(checker: Checker, name: str, parallel: bool) -> None:
    row = FORMATS[name]
    grammar = checker.constraint(row, [WEATHER, QUOTED], required=False, parallel=parallel)
    texts = ["It <b>rains</b> & [pours]; é🦊.\n", written(row, [GOOD])]
    if name != "llama":
        texts += ["I will look.\n" + written(row, [GOOD])]
    for text in texts:
        assert checker.accepts(grammar, text)
    assert checker.accepts(grammar, written(row, [GOOD, OTHER])) == parallel
    for call in (("get_weather", {"city": 3}), ("unheard_of", {})):
        assert not checker.accepts(grammar, written(row, [call]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_comes_first(checker: Checker, name: str, opened: bool) -> None:
    row, call = FORMATS[name], written(FORMATS[name], [GOOD])
    for required in (True, False):
        tags: dict[str, ReasoningTags] = {"reasoning": REASONING_TAGS[0]}
        grammar = checker.constraint(row, [WEATHER], required=required, opened=opened, **tags)
        begin = "" if opened else "<think>\n"
        assert checker.accepts(grammar, f"{begin}Let me <b> see {{}}.\n</think>\n\n{call}")
        assert checker.accepts(grammar, call) == (not opened)
        assert not checker.accepts(grammar, f"{begin}Let me see.\n</think>\n\n{call[:-1]}")


def test_llama_marker_only_where_it_is_a_token(checker: Checker) -> None:
    grammar = checker.constraint(FORMATS["llama"], [WEATHER])
    text = "<|python_tag|>" + written(FORMATS["llama"], [GOOD])
    assert checker.accepts(grammar, text) == (checker.token_of("<|python_tag|>") is not None)


def test_mistral_with_a_space_after_its_marker(checker: Checker) -> None:
    text = written(FORMATS["mistral"], [GOOD]).replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
    for required in (True, False):
        assert checker.accepts(checker.constraint(FORMATS["mistral"], [WEATHER], required=required), text)


def test_schemas_that_a_grammar_cannot_express(checker: Checker) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    loose = checker.constraint(FORMATS["hermes"], [OfferedTool("f", schema)])
    assert checker.accepts(loose, written(FORMATS["hermes"], [("f", {"a": 1})]))
    strict = checker.constraint(FORMATS["hermes"], [OfferedTool("f", schema, strict=True)])
    assert "not" in LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(strict.text), checker.guide)


def test_names_and_schemas_cannot_break_out_of_the_grammar(checker: Checker) -> None:
    hostile = OfferedTool(
        'a" | /.*/ | "\\',
        {"type": "object", "properties": {'k" }\nstart: /.*/': {"enum": ['"}\n%ignore /x/', "</tool_call>"]}}},
    )
    for row in TOOL_FORMATS:
        grammar = checker.constraint(row, [hostile])
        call = (hostile.name, {'k" }\nstart: /.*/': '"}\n%ignore /x/'})
        assert checker.accepts(grammar, written(row, [call]))
        assert not checker.accepts(grammar, "xyz")


def offered(**options: Any) -> list[OfferedTool]:
    return [OfferedTool(name, schema | {"required": sorted(schema["properties"])}, **options)
            for name, schema in SCHEMAS.items()]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("required", [True, False])
def test_calls_in_blocks(checker: Checker, name: str, required: bool) -> None:
    """Texts written from the formats' specifications, and what differs from them or from the schema."""
    row, one, now = ROWS[name], ONE[name].replace("True", "true"), NOW[name]
    grammar = checker.constraint(row, offered(strict=True), required=required)
    single = checker.constraint(row, offered(strict=True), required=required, parallel=False)
    both = f"{one}\n{now}"
    if row.around:
        both = one.removesuffix(row.around[1]) + "\n" + now.removeprefix(row.around[0])
    for text in (one, now, both):
        assert checker.accepts(grammar, text)
        assert checker.accepts(single, text) == (text != both)
        assert len(read(block(name), [text])[2]) == 1 + (text == both)
    for text in (
        one.replace("get_weather", "unheard_of"),
        one.replace("true", "maybe"),
        one.replace("[1, 2.5]", '[1, "2"]'),
        one.replace("city", "town"),
        one[: -len(row.end) - 1],
    ):
        assert not checker.accepts(grammar, text)
    for text in ("It <b>rains</b>.\n", f"I look.\n{one}"):
        assert checker.accepts(grammar, text) == (not required)
    thought = checker.constraint(row, offered(), required=required, reasoning=REASONING_TAGS[0], opened=True)
    assert checker.accepts(thought, f"Hm, <b>.\n</think>\n\n{one}") and not checker.accepts(thought, one)


def test_calls_of_glm_without_line_breaks(checker: Checker) -> None:
    grammar = checker.constraint(ROWS["glm"], offered())
    for text in (ONE["glm"].replace("\n", ""), "<tool_call>now</tool_call>"):
        assert checker.accepts(grammar, text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a", " <b>\n</parameter \n"], []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, ["a", "null"], []),
        ({"enum": ["a", "b c"], "type": "string"}, ["a", "b c"], ["c", "", '"a"']),
        ({"const": "a"}, ["a"], ["b"]),
        ({"$ref": "#/$defs/Color"}, ["red"], ["blue"]),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}], "title": "X"}, ["red", "null"], ["blue", '"red"']),
        ({"anyOf": [{"type": "string", "enum": ["7"]}, {"type": "null"}]}, ["7", "null"], ["8"]),
        ({"type": "array", "items": {"$ref": "#/$defs/Color"}}, ['["red"]'], ['["blue"]', "red"]),
        ({"type": "integer", "minimum": 3}, ["3"], ["2", "a", "3.5"]),
    ],
)
def test_bare_values(checker: Checker, schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """Of a strict tool; what the parser reads is what was written."""
    definitions = {"Color": {"enum": ["red"], "type": "string"}}
    root = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": definitions}
    for name in ("qwen3_coder", "glm"):
        grammar = checker.constraint(ROWS[name], [OfferedTool("f", root, strict=True)])
        for value in good + bad:
            text = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
            if name == "qwen3_coder":
                text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
            assert checker.accepts(grammar, text) == (value in good), value
            if value in good:
                parser = OutputParser(None, BlockParser(ROWS[name], {"f": root}))
                _, _, ((_, arguments),) = read(parser, [text])
                jsonschema.validate(json.loads(arguments), root)


def test_arguments_that_may_be_missing(checker: Checker) -> None:
    tools = [OfferedTool(name, schema) for name, schema in SCHEMAS.items()]
    assert checker.accepts(checker.constraint(ROWS["glm"], tools), "<tool_call>get_weather\n</tool_call>")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"type": "string", "pattern": "a+"}}},
        {"properties": {"x": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}}},
        {"properties": {"x": {}}},
        {"properties": {"x": {"type": "array", "items": {"$ref": "#"}}}},
        {"required": ["x"]},
        {"minProperties": 1},
    ],
)
def test_what_bare_text_cannot_be_held_to(checker: Checker, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="leave strict out"):
        checker.constraint(ROWS["glm"], [OfferedTool("f", {"type": "object", **schema}, strict=True)])
    checker.constraint(ROWS["glm"], [OfferedTool("f", {"type": "object", **schema})])


def test_names_that_would_break_a_block(checker: Checker) -> None:
    for name, key in (("a>b", "c"), ("a", "b<c")):
        with pytest.raises(RequestError, match="cannot be written"):
            checker.constraint(ROWS["qwen3_coder"], [OfferedTool(name, {"properties": {key: {"type": "string"}}})])
    with pytest.raises(RequestError, match="cannot be written"):
        checker.constraint(ROWS["minimax_m2"], [OfferedTool('a"b', {})])


def test_calls_in_channels(checker: Checker) -> None:
    """Texts written from harmony's specification; the end of the last message is the end of the answer."""
    tools = [OfferedTool("get_weather", SCHEMAS["get_weather"], strict=True), OfferedTool("now", SCHEMAS["now"])]
    start, call, before = "<|start|>assistant", CALL.removesuffix("<|call|>"), BEFORE.removesuffix("<|call|>")
    called, final = call.removeprefix(start), FINAL.removesuffix("<|return|>")
    spoken = f"{start}<|channel|>commentary<|message|>I look.<|end|>"
    for required in (True, False):
        grammar = harmony_constraint(tools, checker.token_of, required=required)
        for text in (called, before, ANALYSIS + call, ANALYSIS + start + before, ANALYSIS + spoken + call):
            assert checker.accepts(grammar, text)
            assert not checker.accepts(grammar, text.replace("get_weather", "unheard_of"))
            assert not checker.accepts(grammar, text.replace("3", '"3"'))
        for text in (ANALYSIS + final, final.removeprefix(start)):
            assert checker.accepts(grammar, text) == (not required)
        assert not checker.accepts(grammar, ANALYSIS) and not checker.accepts(grammar, "Yes.")
    with pytest.raises(RequestError, match="cannot be written"):
        harmony_constraint([QUOTED], checker.token_of, required=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"required": [{}]},
        {"properties": {"x": {"anyOf": 5}}},
        {"properties": {"x": {"enum": 5}}},
    ],
)
def test_schemas_that_are_none(checker: Checker, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no valid JSON schema"):
        checker.constraint(ROWS["glm"], [OfferedTool("f", schema, strict=True)])
    text = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    _, content, calls = read(OutputParser(None, BlockParser(ROWS["glm"], {"f": schema})), [text])
    assert content == text or calls == [("f", '{"x": 3}')]
