"""``/v1/messages``: Anthropic's shape, whole and as a stream; the model's text is given."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from qserve.runtime.server.chat.prompts import PromptEncoder
from qserve.runtime.server.chat.template_options import TemplateOptions
from qserve.runtime.server.serve import ServerHandle

from ..scripted import HERMES, PLAIN, THINKING, THOUGHT_OPENED, Scripted, Start

TOOLS: list[Any] = [
    {
        "name": "f",
        "description": "weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
ARGUMENTS = '{"city": "Zü}rich 🦊"}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]
ASK = {"max_tokens": 200, "messages": HI}


def ask(client: Any, path: str = "messages", **body: Any) -> httpx.Response:
    return httpx.post(f"{client.base_url}{path}", json=ASK | body, timeout=30)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    events = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def refused(response: httpx.Response, status: int, kind: str) -> str:
    content = response.json()
    assert (response.status_code, content.keys(), content["type"]) == (status, {"type", "error"}, "error")
    assert content["error"].keys() == {"type", "message"} and content["error"]["type"] == kind
    message: str = content["error"]["message"]
    return message


def test_text(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    tokens = script.say("It rains.\n")
    answer = ask(client, system="be the fox", temperature=0.5, top_p=0.9, top_k=4, metadata={"user_id": "u"}).json()
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tools")
    assert answer["id"].startswith("msg_") and answer["content"] == [{"type": "text", "text": "It rains.\n"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["output_tokens"] == tokens and usage["input_tokens"] > 10
    again = ask(client, system="be the fox").json()["usage"]
    assert again["cache_read_input_tokens"] + again["input_tokens"] == usage["input_tokens"]
    count = ask(client, "messages/count_tokens", max_tokens=None, system="be the fox")
    assert refused(count, 400, "invalid_request_error") == "unknown parameter: 'max_tokens'"
    body = {"messages": HI, "system": [{"type": "text", "text": "be the fox", "cache_control": {"type": "ephemeral"}}]}
    counted = httpx.post(f"{client.base_url}messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": usage["input_tokens"]}


def test_empty_content_is_an_empty_text(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    script.say("a")
    inputs = [
        ask(client, messages=[{"role": "user", "content": empty}], system=system).json()["usage"]
        for empty in ("", [])
        for system in (None, "", [])
    ]
    assert len({usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in inputs}) == 1
    gone_on = [*HI, {"role": "assistant", "content": []}, *HI]  # an answer may have been empty
    assert ask(client, messages=gone_on).status_code == 200


def test_why_it_ended(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    script.say("It rains and rains.")
    cut = ask(client, max_tokens=3).json()
    assert (cut["stop_reason"], cut["stop_sequence"], cut["usage"]["output_tokens"]) == ("max_tokens", None, 3)
    stopped = ask(client, stop_sequences=["xyz", " and"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " and")
    assert stopped["content"] == [{"type": "text", "text": "It rains"}]
    script.say("")
    assert ask(client).json()["content"] == []
    assert ask(client).json()["stop_reason"] == "end_turn"
    script.say(CALL[:-20])
    call = ask(client, tools=TOOLS, max_tokens=40).json()
    assert call["stop_reason"] == "max_tokens"


def test_the_events_of_a_stream(start: Start, script: Scripted) -> None:
    client = start(THINKING)
    script.say(f"<think>\nhm <b>\n</think>\n\nI look.\n{CALL}\n{CALL}")
    whole = ask(client, tools=TOOLS).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0] == {"type": "thinking", "thinking": "hm <b>", "signature": ""}
    call = whole["content"][2]
    assert (call["name"], call["input"], whole["stop_reason"]) == ("f", json.loads(ARGUMENTS), "tool_use")
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 5

    events = events_of(ask(client, tools=TOOLS, stream=True))
    names = [event["type"] for event in events]
    runs = [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", "ping", *(block * 4), "message_delta", "message_stop"]
    begun = events[0]["message"]
    assert begun["content"] == [] and begun["stop_reason"] is None and begun["usage"]["cache_read_input_tokens"] > 0
    built: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(built)
            built.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(built) - 1
            kind = event["delta"].pop("type")
            assert kind == {"tool_use": "input_json"}.get(built[-1]["type"], built[-1]["type"]) + "_delta"
            ((name, text),) = event["delta"].items()
            built[-1]["json" if name == "partial_json" else name] += text
    for one, other in zip(built, whole["content"], strict=True):
        arguments = one.pop("json")
        if arguments:
            assert arguments == ARGUMENTS
            one |= {"input": json.loads(arguments), "id": other["id"]}
        assert one == other
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_message_of_the_assistant_is_continued(
    start: Start, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start(THINKING)
    prompts: list[str] = []
    tail = PromptEncoder.tail
    monkeypatch.setattr(PromptEncoder, "tail", lambda self, ids: prompts.append(tail(self, ids)) or tail(self, ids))  # type: ignore[func-returns-value]
    script.say(" rains.")
    answer = ask(client, messages=[*HI, {"role": "assistant", "content": "It"}]).json()
    assert answer["content"] == [{"type": "text", "text": " rains."}]
    assert prompts[-1].endswith("assistant\nIt")


def test_a_conversation_becomes_the_messages_of_the_template(
    start: Start, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    chat = PromptEncoder.chat
    monkeypatch.setattr(
        PromptEncoder, "chat", lambda self, *given: seen.append(given) or chat(self, *given)  # type: ignore[func-returns-value]
    )
    client = start(THINKING + "{% if enable_thinking %}{% endif %}")
    script.say(f"<think>hm</think>I look.{CALL}")
    first = ask(client, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024}).json()
    assert seen[-1][2] == TemplateOptions(variables={"enable_thinking": True})
    call = next(block for block in first["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "7°"}]}
    failed = result | {"content": "no line", "is_error": True}
    text = {"type": "text", "text": "and tomorrow?", "citations": None}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, failed, text]},
        {"role": "system", "content": "be brief"},
    ]
    script.say("done")
    second = ask(client, tools=TOOLS, messages=messages, system="fox", tool_choice={"type": "none"})
    assert second.json()["content"] == [{"type": "text", "text": "done"}], second.text
    given, tools, options, *_ = seen[-1]
    assert options == TemplateOptions(variables={"enable_thinking": False})
    assert tools == []  # it is not told of what it may not call
    function = {"name": "f", "arguments": json.loads(ARGUMENTS)}
    assert given == [
        {"role": "system", "content": "fox"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "7°"},
        {"role": "tool", "tool_call_id": call["id"], "content": "Error: no line"},
        {"role": "user", "content": "and tomorrow?"},
        {"role": "system", "content": "be brief"},
    ]


def test_tool_choice_and_formats_hold_the_answer(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    script.say("I will not.")  # but it must
    for choice in ({"type": "any"}, {"type": "tool", "name": "f", "disable_parallel_tool_use": True}):
        answer = ask(client, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=400)
        assert [block["type"] for block in answer.json()["content"]] == ["tool_use"], answer.text
        assert answer.json()["content"][0]["name"] == "f"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    script.say('{"a": 1}')
    answer = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert json.loads(answer.json()["content"][0]["text"]) == {"a": 1}


def test_reasoning_is_left_out_unless_asked_for(start: Start, script: Scripted) -> None:
    client = start(THOUGHT_OPENED)
    script.say("hm</think>It rains.")
    asked = ask(client, thinking={"type": "adaptive"}).json()
    assert [block["type"] for block in asked["content"]] == ["thinking", "text"]
    script.say("It rains.")
    assert ask(client).json()["content"] == [{"type": "text", "text": "It rains."}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens must be between 1"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: must be a string"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: a block of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "content[0].x"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}]},
        "holds a block of type 'image'",
    ),
    ({"messages": [*HI, {"role": "assistant", "content": " "}]}, "the last message cannot be continued"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, *HI]}, "content[0].name"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"stop_sequences": ["a"] * 5000}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: the chat template of this model"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names the function 'g'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"mcp_servers": [{"url": "http://x"}]}, "'mcp_servers' is not supported"),
    ({"unheard_of": 1}, "unknown parameter: 'unheard_of'"),
    ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages: the prompt has"),
]


def test_what_is_refused(start: Start, script: Scripted) -> None:
    client = start("{# <tool_call> #}" + PLAIN)
    script.say("a")
    for body, message in CASES:
        assert message in refused(ask(client, **body), 400, "invalid_request_error"), body
    assert "is not served here" in refused(ask(client, model="claude"), 404, "not_found_error")
    assert refused(ask(client, "messages/batches"), 404, "not_found_error")
    assert refused(httpx.get(f"{client.base_url}messages"), 405, "invalid_request_error")
    plain = start(PLAIN)
    assert "format of tool calls" in refused(ask(plain, tools=TOOLS), 400, "invalid_request_error")


def test_a_failure_is_an_error_event(start: Start, script: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start(HERMES)
    script.say("It rains and rains.")
    run, steps = Scripted.run, []

    def breaks(self: Scripted, plan: Any, sink: Any) -> Any:
        steps.append(plan)
        if len(steps) > 4:
            raise RuntimeError("broken")
        return run(self, plan, sink)

    monkeypatch.setattr(Scripted, "run", breaks)
    events = events_of(ask(client, stream=True))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"


def test_keys(server: ServerHandle) -> None:
    def post(**headers: str) -> httpx.Response:
        return httpx.post(f"{server.url}/messages", json=ASK | {"max_tokens": 2}, headers=headers, timeout=30)

    assert "x-api-key" in refused(post(), 401, "authentication_error")
    refused(post(**{"x-api-key": "wrong"}), 401, "authentication_error")
    for headers in (
        {"x-api-key": "second-key", "anthropic-version": "2023-06-01"},
        {"Authorization": "Bearer second-key"},
        {"Authorization": "Bearer wrong", "x-api-key": "second-key"},
    ):
        assert post(**headers).json()["usage"]["output_tokens"] == 2
