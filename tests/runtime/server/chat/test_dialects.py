"""Every dialect on text written from its specification (chat templates and format documents, not models' outputs).

Each text is cut at every possible position, and character by character: the parts joined are those of the whole text.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.runtime.server.chat.block_formats import BLOCK_FORMATS
from qserve.runtime.server.chat.block_parser import BlockParser
from qserve.runtime.server.chat.dialect import AnswerParser, OutputParser
from qserve.runtime.server.chat.harmony import HarmonyParser
from qserve.runtime.server.chat.parts import CallStart
from qserve.runtime.server.chat.reasoning import REASONING_NAMES, ReasoningParser, find_tags
from qserve.runtime.server.chat.tool_formats import FORMAT_NAMES, NAMES, VLLM_PARSERS, find_format

from .test_tool_parser import Joined, joined

ROWS = {row.name: row for row in BLOCK_FORMATS}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "dry": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "at": {"type": "array", "items": {"type": "number"}},
        },
    },
    "now": {"type": "object", "properties": {}},
}
GIVEN = {"city": "7", "days": 3, "dry": True, "at": [1, 2.5]}

ONE = {
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=dry>\nTrue\n</parameter>\n<parameter=at>\n[1, 2.5]\n</parameter>\n</function>\n</tool_call>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>7</parameter>\n<parameter=days>3</parameter>\n"
        "<parameter=dry>true</parameter>\n<parameter=at>[1, 2.5]</parameter>\n</function>\n</seed:tool_call>"
    ),
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>dry</arg_key>\n<arg_value>true</arg_value>\n<arg_key>at</arg_key>\n"
        "<arg_value>[1, 2.5]</arg_value>\n</tool_call>"
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "7", "days": 3, "dry": true, "at": [1, 2.5]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="dry" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="at" string="false">[1, 2.5]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">7</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="dry">true</parameter>\n'
        '<parameter name="at">[1, 2.5]</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "7", "days": 3, "dry": true, "at": [1, 2.5]}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "7", "days": 3, "dry": true, "at": [1, 2.5]}}\n]<|END_ACTION|>'
    ),
    "gemma4": '<|tool_call>call:get_weather{at:[1,2.5],city:<|"|>7<|"|>,days:3,dry:true}<tool_call|>',
    "functiongemma": (
        "<start_function_call>call:get_weather{at:[1,2.5],city:<escape>7<escape>,days:3,dry:true}<end_function_call>"
    ),
    "gemma3": '```tool_code\nget_weather(city="7", days=3, dry=True, at=[1, 2.5])\n```',
    "pythonic": '<|python_start|>[get_weather(city="7", days=3, dry=True, at=[1, 2.5])]<|python_end|>',
}
NOW = {
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>now\n</tool_call>",
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "cohere": '<|START_ACTION|>[{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "functiongemma": "<start_function_call>call:now{}<end_function_call>",
    "gemma3": "```tool_code\nnow()\n```",
    "pythonic": "<|python_start|>[now()]<|python_end|>",
}


def read(parser: AnswerParser, pieces: list[str]) -> Joined:
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def cuts(text: str) -> list[list[str]]:
    return [[text[:at], text[at:]] for at in range(len(text) + 1)] + [list(text)]


def block(name: str, **options: Any) -> OutputParser:
    return OutputParser(None, BlockParser(ROWS[name], SCHEMAS, **options))


@pytest.mark.parametrize("name", ROWS)
def test_calls_at_every_cut(name: str) -> None:
    """Text written from the format's specification: two calls between words, and a function without parameters."""
    text = f"I look. \n{ONE[name]}\n{NOW[name]}\n"
    for pieces in cuts(text):
        thought, content, calls = read(block(name), pieces)
        assert (thought, content) == ("", "I look.")
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [("get_weather", GIVEN), ("now", {})]
    assert len(read(block(name, max_calls=1), list(text))[2]) == 1


@pytest.mark.parametrize("name", ROWS)
def test_what_is_no_call_is_content(name: str) -> None:
    """Text that breaks the format's specification: other functions, no arguments, calls that are cut off."""
    row = ROWS[name]
    for text in (
        ONE[name].replace("get_weather", "unheard_of"),
        f"{row.begin} nothing of the kind {row.end} and on",
        f"{row.begin}{row.end}",
        f"a {row.begin}" + "{[(" * 3000,
        f"a {row.begin}" + "{a:" * 3000 + row.end,
        f"a {row.begin[:-1]}",
        ONE[name][: len(ONE[name]) * 2 // 3],
    ):
        bare = text
        for marker in row.around:
            bare = bare.replace(marker, "")
        for pieces in ([text], list(text)):
            thought, content, calls = read(block(name), pieces)
            assert (thought, calls) == ("", []) and content.split() == bare.split()


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "functiongemma", "seed_oss", "minimax_m2", "cohere"])
def test_a_last_block_may_lack_its_end(name: str) -> None:
    text = NOW[name].removesuffix(ROWS[name].end)
    assert read(block(name), list(text)) == ("", "", [("now", "{}")])


@pytest.mark.parametrize("name", ["minimax_m2", "cohere"])
def test_a_block_may_hold_several_calls(name: str) -> None:
    row, join = ROWS[name], "," if name == "cohere" else ""
    inside = [text.removeprefix(row.begin).removesuffix(row.end).strip().strip("[]") for text in (ONE[name], NOW[name])]
    text = join.join(inside)
    both = f"{row.begin}{f'[{text}]' if join else text}{row.end}"
    for pieces in cuts(both):
        assert [called for called, _ in read(block(name), pieces)[2]] == ["get_weather", "now"]


def test_the_ids_of_kimi_are_those_that_it_writes() -> None:
    """Its template shows them again."""
    parts = block("kimi_k2").feed(ONE["kimi_k2"] + NOW["kimi_k2"])
    assert [part.id for part in parts if isinstance(part, CallStart)] == ["functions.get_weather:0", "functions.now:1"]


def test_an_answer_of_command() -> None:
    """Text written from Cohere's specification: reasoning, then an answer between tags of its own, or calls."""
    tags = find_tags("... <|START_THINKING|> ...")
    assert tags is not None and tags is find_tags("", "cohere_command3")
    thought = "<|START_THINKING|>hm<|END_THINKING|>"
    answer = "<|START_RESPONSE|>It <b>rains</b>. <|END_RESPONSE|>"
    for text, expected in (
        (thought + answer, ("hm", "It <b>rains</b>.", [])),
        (answer, ("", "It <b>rains</b>.", [])),
        (answer.removeprefix("<|START_RESPONSE|>"), ("", "It <b>rains</b>.", [])),
        (thought + NOW["cohere"], ("hm", "", [("now", "{}")])),
        (NOW["cohere"], ("", "", [("now", "{}")])),
        (answer + NOW["cohere"], ("", "It <b>rains</b>.", [("now", "{}")])),
    ):
        for pieces in cuts(text):
            parser = OutputParser(ReasoningParser(tags), BlockParser(ROWS["cohere"], SCHEMAS))
            assert read(parser, pieces) == expected


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[get_weather(city='a'), now()]", [("get_weather", {"city": "a"}), ("now", {})]),
        (" [now()]\n", [("now", {})]),
        ("[now()] and on", None),
        ("[1, 2]", None),
        ("[now(1)]", None),
        ("[__import__('os')]", None),
        ("now()", None),
    ],
)
def test_a_bare_list_of_python(text: str, calls: list[Any] | None) -> None:
    """Text written from Llama 4's specification of pythonic calls, which has no markers."""
    for pieces in cuts(text):
        _, content, found = read(block("pythonic"), pieces)
        assert (content, [(name, json.loads(given)) for name, given in found]) == (("", calls) if calls else (text, []))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7.5", "7.5"),
        ({"type": ["string", "array"]}, "[7]", [7]),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "False", False),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "1", 1),
        ({}, "a", "a"),
        ({"type": "string"}, "  two\nlines ", "  two\nlines "),
    ],
)
def test_bare_text_has_the_type_of_its_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    schemas = {"f": {"type": "object", "properties": {"x": schema}}}
    for name, written in (
        ("qwen3_coder", f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"),
        ("glm", f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        _, _, ((_, arguments),) = read(OutputParser(None, BlockParser(ROWS[name], schemas)), [written])
        assert json.loads(arguments) == {"x": value}


ANALYSIS = "<|channel|>analysis<|message|>Hm, <b>.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"days": 3}<|call|>'
)
BEFORE = ' to=functions.get_weather<|channel|>commentary json<|message|>{"days": 3}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes. <|return|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + FINAL, ("Hm, <b>.", "Yes. ", [])),
        (ANALYSIS + CALL, ("Hm, <b>.", "", [("get_weather", '{"days": 3}')])),
        (ANALYSIS + CALL.removesuffix("<|call|>"), ("Hm, <b>.", "", [("get_weather", '{"days": 3}')])),
        (BEFORE, ("", "", [("get_weather", '{"days": 3}')])),
        (BEFORE + CALL, ("", "", [("get_weather", '{"days": 3}')] * 2)),
        (CALL.replace('{"days": 3}', ""), ("", "", [("get_weather", "{}")])),
        (CALL.replace("get_weather", "unheard_of"), ("", '{"days": 3}', [])),
        (ANALYSIS + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + CALL,
         ("Hm, <b>.", "I look.", [("get_weather", '{"days": 3}')])),
        ("<|channel|>analysis<|message|>cut off", ("cut off", "", [])),
        ("<|channel|>ana", ("", "", [])),
        ("<|channel|>nothing<|message|>a", ("", "a", [])),
        ("no channel at all", ("", "no channel at all", [])),
        ("no channel at first<|end|>" + FINAL, ("", "no channel at firstYes. ", [])),
        ('{"a": 1}', ("", '{"a": 1}', [])),
        ("tomorrow", ("", "tomorrow", [])),
        ("t", ("", "t", [])),
        ("", ("", "", [])),
    ],
)
def test_harmony(text: str, expected: Joined) -> None:
    """Text written from the specification of harmony, after a prompt that ends with ``<|start|>assistant``."""
    for pieces in cuts(text):
        assert read(HarmonyParser(SCHEMAS), pieces) == expected


def test_harmony_calls_beyond_the_limit_and_reasoning_that_is_not_shown() -> None:
    assert len(read(HarmonyParser(SCHEMAS, 1), [CALL + CALL])[2]) == 1
    for pieces in cuts(ANALYSIS + FINAL):
        assert read(HarmonyParser((), shows_reasoning=False), pieces) == ("", "Yes. ", [])


def test_harmony_that_goes_on_with_a_message() -> None:
    for pieces in cuts(" to=a, <b>.<|end|>" + CALL):
        assert read(HarmonyParser(SCHEMAS, opened=True), pieces) == (
            "", " to=a, <b>.", [("get_weather", '{"days": 3}')],
        )


@pytest.mark.parametrize(
    ("name", "text", "opened", "expected"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nYes", False, ("hm", "Yes")),
        ("deepseek_v31", "hm</think>Yes", True, ("hm", "Yes")),
        ("mistral", "[THINK]hm[/THINK]Yes", False, ("hm", "Yes")),
        ("seed_oss", "<seed:think>hm</seed:think>Yes", False, ("hm", "Yes")),
        ("gemma4", "<|channel>thought\nhm\n<channel|>Yes", False, ("hm", "Yes")),
        ("granite", "<think>hm</think>\n<response> Yes, <b>. </response>", False, ("hm", "Yes, <b>.")),
        ("granite", "<think>hm</think>\n<response>cut off", False, ("hm", "cut off")),
        ("granite", "<think>hm</think>Yes", False, ("hm", "Yes")),
        ("granite", "<think>hm</think><resp", False, ("hm", "<resp")),
        ("granite", " Yes, <b>.\n\nNo ", False, ("", " Yes, <b>.\n\nNo ")),
        ("kimi_k2", "<think>hm</think>Yes", False, ("hm", "Yes")),
        ("minimax_m2", "hm\n</think>\n\nYes", True, ("hm", "Yes")),
    ],
)
def test_reasoning(name: str, text: str, opened: bool, expected: tuple[str, str]) -> None:
    """Text written from the specification of each kind of reasoning."""
    tags = find_tags("", name)
    assert tags is not None
    for pieces in cuts(text):
        assert read(OutputParser(ReasoningParser(tags, opened), None), pieces)[:2] == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_text_depends_on_its_cuts_or_fails(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(BLOCK_FORMATS))
    harmony = ["<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", CALL, "to="]
    pieces = [*row.markers, ONE[row.name], NOW[row.name], *harmony, *"<[({})]>:, \na", "get_weather", "<think>"]
    text = "".join(data.draw(st.lists(st.sampled_from([piece for piece in pieces if piece]), max_size=12)))
    assert read(block(row.name), [text]) == read(block(row.name), list(text))
    assert read(HarmonyParser(SCHEMAS), [text]) == read(HarmonyParser(SCHEMAS), list(text))


LONG = 30_000
HOSTILE = {
    "deepseek": ["function<｜tool▁sep｜>now\n```json{" + " " * LONG + "x y"],
    "glm": ["now<arg_key>k" + "</arg_key><arg_value>" * (LONG // 20), "now<arg_key>" + " " * LONG],
    "qwen3_coder": [
        "<function=now>" + "</function>" * (LONG // 11) + "x",
        "<function=now>" + "<parameter=k></parameter>" * (LONG // 25),
        "<function=now>" + " " * LONG + "</function> x",
    ],
    "deepseek_v32": [' name="now">' + '<｜DSML｜parameter name="k">' * (LONG // 26)],
    "minimax_m2": [
        '<invoke name="now">' * (LONG // 19),
        '<invoke name="now">' + '<parameter name="k">' * (LONG // 20) + "</invoke>",
    ],
    "kimi_k2": ["functions." + ":1" * LONG, " " * LONG],
    "cohere": ["[" * LONG],
    "gemma4": ["call:now{" + "a:{" * (LONG // 3), "call:now{" + "[," * LONG],
    "gemma3": ["(" * LONG, "now(a=" + "-" * LONG + "1)"],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_long_block_is_refused_in_a_moment(name: str) -> None:
    """Everybody's answers are read by one thread. The best of three: others on a busy machine take its caches."""

    def seconds(text: str) -> float:
        start = time.process_time()
        with pytest.raises(ValueError, match=r"\w"):
            ROWS[name].read(text, SCHEMAS)
        return time.process_time() - start

    for text in HOSTILE[name]:
        assert min(seconds(text) for _ in range(3)) < 0.1


def test_names() -> None:
    """Every name of vLLM's that is taken leads to a format, and every format has one name."""
    assert len(set(FORMAT_NAMES)) == len(FORMAT_NAMES) == len(NAMES) + len(ROWS) + 1
    assert set(VLLM_PARSERS.values()) <= set(FORMAT_NAMES) and not set(VLLM_PARSERS) & set(FORMAT_NAMES)
    for name, row in ROWS.items():
        assert find_format(name, "") is row and find_format("auto", row.signs[0]) is row
    assert all(find_tags("", name) for name in REASONING_NAMES if name != "openai_gptoss")
