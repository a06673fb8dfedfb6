"""The grammars of tool calls, compiled by llguidance and tried on texts."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qserve.runtime.constraint import Constraint
from qserve.runtime.server.chat.dialect import Dialect
from qserve.runtime.server.chat.reasoning import REASONING_TAGS, ReasoningTags
from qserve.runtime.server.chat.tool_formats import NAMES, TOOL_FORMATS, ToolFormat
from qserve.runtime.server.chat.tool_grammar import tool_constraint
from qserve.runtime.server.chat.tool_use import OfferedTool

from .test_tool_parser import parse, written

FORMATS = {row.name: row for row in TOOL_FORMATS}
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
    tokenizer.add_tokens([AddedToken(marker, special=special) for marker in markers], special_tokens=special)
    return tokenizer


@pytest.fixture(scope="module")
def guide(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    return from_tokenizer(tokenizer)


class Checker:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, guide: LLTokenizer) -> None:
        self.tokenizer, self.guide = tokenizer, guide
        self.token_of = Dialect(tokenizer, "none", "none").token_of

    def constraint(self, row: ToolFormat, tools: list[OfferedTool], **options: Any) -> Constraint:
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
