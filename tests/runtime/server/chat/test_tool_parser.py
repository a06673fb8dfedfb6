"""Tool calls and reasoning found in texts: every format, and however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import UsageError
from qserve.runtime.server.chat.dialect import OutputParser
from qserve.runtime.server.chat.parts import CallArguments, CallStart, Part, Text, Thought
from qserve.runtime.server.chat.reasoning import REASONING_TAGS, ReasoningParser, find_tags
from qserve.runtime.server.chat.tool_formats import NAMES, TOOL_FORMATS, ToolFormat, find_format
from qserve.runtime.server.chat.tool_parser import ToolParser
from qserve.runtime.server.config import ServerConfig

FORMATS = {row.name: row for row in TOOL_FORMATS}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Zürich 🦊", "deep": {"list": [1, [2, {"x": None}]], "s": 'a "quote" \\ and }{]['}}),
    ('say "hi" é', {}),
    ("get_weather", {"text": "</tool_call> <tool_call> [TOOL_CALLS] ; {\n}", "n": -1.5e-3, "ok": True}),
]
NAMES_OFFERED = {name for name, _ in CALLS}

Joined = tuple[str, str, list[tuple[str, str]]]


def written(row: ToolFormat, calls: list[tuple[str, dict[str, Any]]], *, ascii: bool = False) -> str:
    """Calls as a model of this format writes them."""

    def one(name: str, arguments: dict[str, Any]) -> str:
        return json.dumps({"name": name, row.arguments: arguments}, ensure_ascii=ascii)

    match row.layout:
        case "tagged":
            return "\n".join(f"<tool_call>\n{one(*call)}\n</tool_call>" for call in calls)
        case "bare":
            return "; ".join(one(*call) for call in calls)
        case "list":
            return f"{row.begin}[{', '.join(one(*call) for call in calls)}]"
        case "named":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a, ensure_ascii=ascii)}" for name, a in calls)


def joined(parts: list[Part]) -> Joined:
    """Thought, content, calls. Checks that parts come as a client needs them."""
    calls: list[list[str]] = []
    for part in parts:
        match part:
            case CallStart(index, identity, name):
                assert index == len(calls) and identity
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1 and text
                calls[index][1] += text
            case Text(text) | Thought(text):
                assert text
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    content = "".join(part.text for part in parts if isinstance(part, Text))
    return thought, content, [(name, arguments) for name, arguments in calls]


def parse(row: ToolFormat, pieces: list[str], **options: Any) -> Joined:
    parser = ToolParser(row, NAMES_OFFERED, **options)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ascii", [False, True])
def test_calls_are_found(name: str, ascii: bool) -> None:
    row = FORMATS[name]
    for calls in (CALLS[:1], CALLS[1:2], CALLS):
        text = written(row, calls, ascii=ascii)
        for pieces in ([text], list(text)):
            thought, content, found = parse(row, pieces)
            assert (thought, content) == ("", "")
            assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("name", ["mistral-named", "mistral", "hermes"])
def test_text_before_and_after_calls(name: str) -> None:
    row = FORMATS[name]
    text = f"I will look. \n\n{written(row, CALLS[:1])}\n"
    for pieces in ([text], list(text)):
        assert parse(row, pieces)[1] == "I will look."
    assert parse(row, [text + "Done. "])[1] == "I will look.\nDone."
    assert len(parse(row, [text + written(row, CALLS)])[2]) == 4


def test_arguments_come_while_they_are_written() -> None:
    text = written(FORMATS["hermes"], CALLS[:1])
    parser = ToolParser(FORMATS["hermes"], NAMES_OFFERED)
    parts = [part for character in text for part in parser.feed(character)]
    assert isinstance(parts[0], CallStart)
    assert len(parts) > 50  # fragments, not one piece at the end


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '{"arguments": {"a": 1}, "name": "get_weather"}'),
        ("hermes", '{"type": "function", "name": "get_weather", "arguments": {"a": 1}}'),
        ("hermes", '{"name": "get_weather", "parameters": {"a": 1}, "id": "x"}'),
        ("hermes", '{"name": "get_weather", "arguments": "{\\"a\\": 1}"}'),
        ("hermes", ' \n {"name":"get_weather","arguments":{"a":1}'),
    ],
)
def test_other_orders_and_shapes(name: str, text: str) -> None:
    whole = f"<tool_call>{text}</tool_call>"
    for pieces in ([whole], list(whole)):
        _, content, ((called, arguments),) = parse(FORMATS[name], pieces)
        assert (content, called, json.loads(arguments)) == ("", "get_weather", {"a": 1})


def test_llama_with_its_marker_and_mistral_with_call_ids() -> None:
    one = written(FORMATS["llama"], CALLS[:1])
    assert parse(FORMATS["llama"], [f"<|python_tag|>{one}"])[2][0][0] == "get_weather"
    assert parse(FORMATS["llama"], [f"Sure.<|python_tag|>{one}"])[:2] == ("", "Sure.")
    text = '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}'
    assert parse(FORMATS["mistral"], list(text))[2] == [("get_weather", '{"a": 1}'), ("get_weather", "{}")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "plain text, <b>html</b>, <tool_cal"),
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", '<tool_call>{"name": "get_weather", "arg'),
        ("hermes", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather" </tool_call> and on'),
        ("hermes", '<tool_call>{"name": "\\u12"}</tool_call>'),
        ("hermes", "<tool_call><tool_call>  </tool_call>"),
        ("hermes", "<tool_call>{}" + "{" * 3000),
        ("hermes", '<tool_call>{"name":' + "[" * 3000 + "]" * 3000 + "}"),
        ("llama", '{"name": "Ann", "parameters": {}}'),
        ("llama", '{"city": {"name": "Ann"}} '),
        ("llama", "  text first, " + written(FORMATS["llama"], CALLS[:1])),
        ("llama", "<|python_tag|>print(1)"),
        ("llama", "   "),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS] what is this" * 100),
        ("mistral-named", "[TOOL_CALLS]get_weather[ARGS]1"),
        ("mistral-named", "[TOOL_CALLS]unheard_of[ARGS]{}"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(FORMATS[name], pieces) == ("", text, [])


def test_a_call_that_is_cut_off_or_broken_keeps_what_was_written() -> None:
    whole = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    assert parse(FORMATS["hermes"], [whole]) == ("", "", [("get_weather", '{"city": "Par')])
    text = '<tool_call>{"name": "get_weather", "arguments": {"a": 1</tool_call> so <tool_call>' + (
        '{"name": "get_weather", "arguments": {}}</tool_call>'
    )
    assert parse(FORMATS["hermes"], list(text)) == (
        "",
        " so",
        [("get_weather", '{"a": 1'), ("get_weather", "{}")],
    )


@pytest.mark.parametrize("name", NAMES)
def test_calls_beyond_the_limit_are_dropped(name: str) -> None:
    text = written(FORMATS[name], CALLS)
    assert len(parse(FORMATS[name], [text], max_calls=1)[2]) == 1
    assert parse(FORMATS[name], list(text), max_calls=1)[1] == ""


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
        *('{"name": "get_weather", "arguments": ', '{"name": "get_weather", "parameters": ', '"name": "get_weather"'),
        *("<think>", "</think>", "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "a", "é", "🦊", "<", "<t"),
        *("get_weather", '{"a": "}"}'),
        *(written(row, CALLS[:1]) for row in TOOL_FORMATS),
    ]
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), fragments=st.lists(FRAGMENTS, max_size=14))
def test_the_result_does_not_depend_on_how_the_text_is_cut(data: st.DataObject, fragments: list[str]) -> None:
    text = "".join(fragments)
    row = data.draw(st.sampled_from(TOOL_FORMATS))
    limit = data.draw(st.sampled_from([None, 1]))
    opened, tags = data.draw(st.booleans()), data.draw(st.sampled_from([None, *REASONING_TAGS]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    results = []
    for pieces in ([text], list(text), [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]):
        reasoning = None if tags is None else ReasoningParser(tags, opened)
        parser = OutputParser(reasoning, ToolParser(row, NAMES_OFFERED, limit))
        results.append(joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish()))
    assert results[0] == results[1] == results[2]


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab <tool_call>/{}\n🦊", max_size=60))
@example("a <tool_cal")
def test_text_without_calls_is_untouched(text: str) -> None:
    for row in TOOL_FORMATS:
        assert parse(row, list(text)) == ("", text, [])


@settings(max_examples=40, deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["</tool_call>", '"}']),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    ),
    ascii=st.booleans(),
)
def test_any_arguments_come_through(arguments: dict[str, Any], ascii: bool) -> None:
    for row in TOOL_FORMATS:
        text = written(row, [("get_weather", arguments), CALLS[0]], ascii=ascii)
        _, content, found = parse(row, list(text))
        assert content == ""
        assert [json.loads(written) for _, written in found] == [arguments, CALLS[0][1]]


def think(text: str, *, opened: bool = False, one_by_one: bool = True) -> tuple[str, str]:
    parser = OutputParser(ReasoningParser(REASONING_TAGS[0], opened), None)
    parts = [part for piece in (list(text) if one_by_one else [text]) for part in parser.feed(piece)]
    thought, content, _ = joined(parts + parser.finish())
    return thought, content


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm, <b>\n</think>\n\nYes. ", False, ("hm, <b>", "Yes. ")),
        ("hm\n</think>\n\nYes", True, ("hm", "Yes")),
        ("<think>hm</think>Yes", True, ("hm", "Yes")),
        ("<think>\n\n</think>\n\nYes", False, ("", "Yes")),
        ("</think>Yes", True, ("", "Yes")),
        ("No thought <think>at all</think>", False, ("", "No thought <think>at all</think>")),
        ("<think>cut off in </thi", False, ("cut off in </thi", "")),
        ("cut off \n", True, ("cut off", "")),
        ("<thi", True, ("<thi", "")),
        ("<thi", False, ("", "<thi")),
        ("  ", True, ("", "")),
        ("  \nx", False, ("", "  \nx")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
    ],
)
def test_reasoning(text: str, opened: bool, expected: tuple[str, str], one_by_one: bool) -> None:
    assert think(text, opened=opened, one_by_one=one_by_one) == expected


def test_a_call_in_a_thought_is_none() -> None:
    call = written(FORMATS["hermes"], CALLS[:1])
    parser = OutputParser(ReasoningParser(REASONING_TAGS[0], True), ToolParser(FORMATS["hermes"], NAMES_OFFERED))
    parts = parser.feed(f"{call}</think>\n{call}")
    assert parser.num_calls == 1 and not parser.thinking
    thought, content, found = joined(parts + parser.finish())
    assert (thought, content, len(found)) == (call, "", 1)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call><function=x><parameter=y>' }}", "qwen3_coder"),
        ("{{ '<tool_call><arg_key>' }}", "glm"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral-named"),
        ("Respond in the format {\"name\": function name, \"parameters\": dictionary}", "llama"),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_formats_by_template(template: str, name: str | None) -> None:
    row = find_format("auto", template)
    assert (row.name if row else None) == name
    assert find_format("none", template) is None
    assert find_format("llama", template) is FORMATS["llama"]


def test_tags_by_template() -> None:
    assert find_tags("{{ content.split('</think>')[-1] }}") is REASONING_TAGS[0]
    assert find_tags("[THINK]") is REASONING_TAGS[3]
    assert find_tags("{{ messages }}") is None


def test_ids_are_as_templates_want_them() -> None:
    assert len(FORMATS["mistral"].call_id()) == 9 and FORMATS["mistral"].call_id().isalnum()
    assert FORMATS["hermes"].call_id() != FORMATS["hermes"].call_id()


@pytest.mark.parametrize("options", [{"tool_format": "xml"}, {"reasoning": "always"}])
def test_a_choice_that_there_is_not(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="choose from auto, none"):
        ServerConfig(**options)  # type: ignore[arg-type]
