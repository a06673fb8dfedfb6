"""``/v1/responses``, judged by the official client; the model's text is given."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from qserve.runtime.engine import Engine
from qserve.runtime.server.chat.prompts import PromptEncoder
from qserve.runtime.server.openai.responses_request import ResponseRequest

from ..http.test_bad_input import refused
from ..scripted import HERMES, PLAIN, THINKING, Scripted, Start

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "f",
        "description": None,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": None,
    }
]
ARGUMENTS = '{"city": "Zü}rich 🦊"}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


def test_text(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    tokens = script.say("It rains.\n")
    answer = client.responses.create(
        model="tools", input="hello", instructions="be the fox", temperature=0.5, top_p=0.9, max_output_tokens=40
    )
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "It rains.\n")
    assert answer.model == "tools" and answer.id.startswith("resp_") and answer.error is None
    assert (answer.instructions, answer.temperature, answer.top_p, answer.max_output_tokens) == (
        "be the fox",
        0.5,
        0.9,
        40,
    )
    (item,) = answer.output
    assert item.type == "message" and (item.role, item.status) == ("assistant", "completed")
    usage = answer.usage
    assert usage is not None and usage.output_tokens == tokens
    assert usage.total_tokens == usage.input_tokens + tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "text"


def test_max_output_tokens_and_no_text_at_all(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    script.say("It rains and rains.")
    answer = client.responses.create(model="tools", input="hi", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert "It rains and rains.".startswith(answer.output_text) and answer.output_text
    last = list(client.responses.create(model="tools", input="hi", max_output_tokens=3, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == answer.output_text
    script.say("")
    answer = client.responses.create(model="tools", input="hi")
    assert (answer.status, answer.output_text, answer.output[0].type) == ("completed", "", "message")


def test_the_events_of_a_stream(start: Start, script: Scripted) -> None:
    client = start(THINKING)
    script.say(f"<think>\nhm <b>\n</think>\n\nI look.\n{CALL}\n{CALL}")
    whole = client.responses.create(model="tools", input="hi", tools=TOOLS)
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens > 5
    events = list(client.responses.create(model="tools", input="hi", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    runs = [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]
    part = ["content_part.added", "%s.delta", "%s.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert runs == [
        *("created", "in_progress"),
        *("output_item.added", *(n.replace("%s", "reasoning_text") for n in part), "output_item.done"),
        *("output_item.added", *(n.replace("%s", "output_text") for n in part), "output_item.done"),
        *(call * 2),
        "completed",
    ]
    final = events[-1]
    assert final.type == "response.completed"
    grown: dict[int, str] = {}
    for event in events:
        if event.type in (
            "response.reasoning_text.delta",
            "response.output_text.delta",
            "response.function_call_arguments.delta",
        ):
            item = final.response.output[event.output_index]
            assert item.id == event.item_id
            grown[event.output_index] = grown.get(event.output_index, "") + event.delta
    assert grown == {0: "hm <b>", 1: "I look.", 2: ARGUMENTS, 3: ARGUMENTS}
    for one, other in zip(final.response.output, whole.output, strict=True):
        assert one.model_dump(exclude={"id", "call_id"}) == other.model_dump(exclude={"id", "call_id"})
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.response.output


def test_the_sdk_gathers_streams_and_parses(start: Start, script: Scripted) -> None:
    class Weather(BaseModel):
        city: str

    client = start(HERMES)
    script.say(CALL)
    with client.responses.stream(model="tools", input="hi", tools=TOOLS) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert names[-1] == "response.completed"
    (call,) = final.output
    assert call.type == "function_call" and (call.name, call.arguments) == ("f", ARGUMENTS)
    script.say(ARGUMENTS)
    parsed = client.responses.parse(model="tools", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Zü}rich 🦊")


def test_frames(start: Start, script: Scripted) -> None:
    client = start(PLAIN)
    script.say("a")
    text = httpx.post(f"{client.base_url}responses", json={"input": "hi", "stream": True}, timeout=30).text
    frames = text.removesuffix("\n\n").split("\n\n")
    for frame in frames:
        event, data = frame.split("\n")
        assert event.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert len(frames) == 9 and "DONE" not in text


def test_a_conversation_goes_on(start: Start, script: Scripted) -> None:
    client = start(THINKING)
    script.say(f"<think>hm</think>I look.{CALL}")
    first = client.responses.create(model="tools", input="hi", tools=TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    items: list[Any] = [{"role": "user", "content": "hi"}, *first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
    script.say("done")
    answer = client.responses.create(model="tools", input=items, tools=TOOLS)
    assert answer.output_text == "done"


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
    body = {
        "instructions": "be the fox",
        "input": [
            {"role": "developer", "content": "one"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "three", "annotations": []}]},
            call,
            call | {"call_id": "b", "arguments": "no json"},
            {"type": "function_call_output", "call_id": "a", "output": "four"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "five"}]},
            call,
            {"role": "assistant", "content": "six"},
        ],
    }

    def shown(identity: str, arguments: Any) -> dict[str, Any]:
        return {"id": identity, "type": "function", "function": {"name": "f", "arguments": arguments}}

    assert ResponseRequest.model_validate(body).messages() == [
        {"role": "system", "content": "be the fox"},
        {"role": "system", "content": "one"},
        {"role": "user", "content": "two"},
        {
            "role": "assistant",
            "content": "three",
            "reasoning_content": "hm",
            "tool_calls": [shown("a", {"x": 1}), shown("b", "no json")],
        },
        {"role": "tool", "content": "four", "tool_call_id": "a"},
        {"role": "tool", "content": "five", "tool_call_id": "b"},
        {"role": "assistant", "content": "", "tool_calls": [shown("a", {"x": 1})]},
        {"role": "assistant", "content": "six"},
    ]


def test_text_format_becomes_a_constraint() -> None:
    def constraint(**format: Any) -> Any:
        body = {"input": "a", "text": {"format": format}}
        return ResponseRequest.model_validate(body).sampling_params({}).constraint

    assert constraint(type="text") is None
    assert json.loads(constraint(type="json_object").text) == {"type": "object"}
    found = constraint(type="json_schema", name="a", schema={"type": "array"}, strict=True)
    assert (found.kind, json.loads(found.text), found.param) == (
        "json_schema",
        {"type": "array"},
        "text.format.schema",
    )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{}]}, "input[0].role"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": 3}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": [{"role": "user", "content": "a"}] * 5000}, "input"),
    ({"input": "hello " * 4000}, "input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"store": True}, "store"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "a"}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"messages": []}, "messages"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": TOOLS * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"verbosity": "shrill"}}, "text.verbosity"),
    (
        {"text": {"format": {"type": "json_object"}}, "tools": TOOLS, "tool_choice": "required"},
        "tool_choice",
    ),
]


def test_bad_fields(start: Start) -> None:
    client = start(HERMES)
    with httpx.Client(base_url=str(client.base_url), timeout=30) as http:
        for body, param in BAD:
            refused(http.post("responses", json={"input": "hi"} | body), 400, param)
        refused(http.post("responses", json={}), 400, "input")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_a_failure_of_the_engine_is_the_last_event(
    start: Start, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start(PLAIN)
    tokens = script.say("It rains and rains.")
    run, steps = script.run, 0

    def broken(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == tokens // 2:
            raise RuntimeError("no")
        return run(*arguments)

    monkeypatch.setattr(script, "run", broken)
    last = list(client.responses.create(model="tools", input="hi", stream=True))[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.status == "failed" and "It rains".startswith(last.response.output_text[:8])
    for stream in (False, True):  # whole, or before the first output: an error of HTTP
        steps = tokens // 2 - 1
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="tools", input="hi", stream=stream)


def test_instructions_reach_the_prompt(scripted_engine: Engine) -> None:
    scripted_engine.tokenizer.chat_template = HERMES
    encoder = PromptEncoder(
        scripted_engine.tokenizer, scripted_engine.max_model_len, scripted_engine.vocab_size
    )
    body = ResponseRequest.model_validate({"input": "hi", "instructions": "be the fox"})
    assert "be the fox" in encoder.decode(encoder.chat(body.messages()))
