"""Tool calls and reasoning over HTTP, judged by the official client; the model's text is given."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from qserve.runtime.constraint import Constraint
from qserve.runtime.detokenizer import new_detokenizer
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.chat.dialect import Dialect
from qserve.runtime.server.chat.preprocessing import ChatInputs, preprocess
from qserve.runtime.server.chat.prompts import PromptEncoder
from qserve.runtime.server.chat.template_options import TemplateOptions
from qserve.runtime.server.chat.tool_use import ToolUse
from qserve.runtime.server.openai.messages import CalledFunction
from qserve.runtime.server.openai.tools import Function, Named, tool_use

from ..http.test_bad_input import refused
from ..scripted import (
    HERMES,
    LLAMA,
    MARKERS,
    MISTRAL,
    MISTRAL_NAMED,
    PLAIN,
    THINKING,
    THOUGHT_OPENED,
    Scripted,
    Start,
)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": 'say "hi"'}},
]
USER: list[Any] = [{"role": "user", "content": "hi"}]
_SHOWN = HERMES.partition("#}")[2]
ARGUMENTS = {"city": "Zü}rich 🦊"}
BODY = json.dumps(ARGUMENTS, ensure_ascii=False)
HERMES_CALL = f'<tool_call>\n{{"name": "f", "arguments": {BODY}}}\n</tool_call>'
HERMES_TWO = HERMES_CALL + '\n<tool_call>\n{"name": "say \\"hi\\"", "arguments": {}}\n</tool_call>'
TWO: list[tuple[str, str]] = [
    (HERMES, HERMES_TWO),
    (LLAMA, f'{{"name": "f", "parameters": {BODY}}}; {{"name": "say \\"hi\\"", "parameters": {{}}}}'),
    (LLAMA, f'<|python_tag|>{{"name": "f", "parameters": {BODY}}}; {{"name": "say \\"hi\\"", "parameters": {{}}}}'),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "f", "arguments": {BODY}}}, {{"name": "say \\"hi\\"", "arguments": {{}}}}]'),
    (MISTRAL_NAMED, f'[TOOL_CALLS]f[ARGS]{BODY}[TOOL_CALLS]say "hi"[ARGS]{{}}'),
]

def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=client.models.list().data[0].id, messages=USER, **more)


def streamed(client: openai.OpenAI, **more: Any) -> tuple[dict[str, Any], str | None]:
    """The message of choice 0 put together from its deltas, checked as clients depend on it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reason = None
    for number, chunk in enumerate(ask(client, stream=True, **more)):
        (choice,) = chunk.choices
        assert reason is None
        reason = choice.finish_reason
        delta = choice.delta.model_dump(exclude_unset=True)
        assert (delta == {"role": "assistant", "content": ""}) == (number == 0)
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call.keys() == {"index", "id", "type", "function"} and call["type"] == "function"
                assert call["function"]["arguments"] == ""
                message["calls"].append([call["id"], call["function"]["name"], ""])
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                message["calls"][call["index"]][2] += call["function"]["arguments"]
    return message, reason


@pytest.mark.parametrize(("template", "text"), TWO)
def test_two_calls_whole_and_streamed(start: Start, script: Scripted, template: str, text: str) -> None:
    client = start(template)
    tokens = script.say(text)
    answer = ask(client, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [("function", "f"), ("function", 'say "hi"')]
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, {}]
    assert len({call.id for call in calls}) == 2
    assert answer.usage.completion_tokens == tokens
    message, reason = streamed(client, tools=TOOLS)
    assert (reason, message["content"]) == ("tool_calls", "")
    assert [(name, json.loads(arguments)) for _, name, arguments in message["calls"]] == [
        ("f", ARGUMENTS),
        ('say "hi"', {}),
    ]
    assert len(message["calls"][0][2]) == len(calls[0].function.arguments)


def test_text_before_a_call_and_choices_and_usage_and_logprobs(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    tokens = script.say(f"I look.\n{HERMES_CALL}")
    answer = ask(client, tools=TOOLS, n=2, logprobs=True, top_logprobs=1)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 2
    for choice in answer.choices:
        assert choice.message.content == "I look."
        assert len(choice.message.tool_calls) == 1
        assert len(choice.logprobs.content) == tokens
    chunks = list(
        ask(client, tools=TOOLS, n=2, logprobs=True, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2 * tokens
    for index in range(2):
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert own[-1].finish_reason == "tool_calls"
        assert sum(len(choice.logprobs.content) for choice in own if choice.logprobs) == tokens
        assert "".join(choice.delta.content or "" for choice in own) == "I look."


def test_an_answer_without_calls(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    for text in ("It rains.\n", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>'):
        script.say(text)
        choice = ask(client, tools=TOOLS).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
        message, reason = streamed(client, tools=TOOLS)
        assert (reason, message["content"], message["calls"]) == ("stop", text, [])


def test_max_tokens_inside_a_call_is_length(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    tokens = script.say(HERMES_CALL)
    choice = ask(client, tools=TOOLS, max_tokens=tokens - 12).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.arguments and BODY.startswith(call.function.arguments)
    message, reason = streamed(client, tools=TOOLS, max_tokens=tokens - 12)
    assert (reason, message["calls"][0][2]) == ("length", call.function.arguments)


def test_choices_of_tools(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    named = {"type": "function", "function": {"name": "f"}}
    for choice, text, count in (("required", HERMES_TWO, 2), ("auto", HERMES_TWO, 2), (named, HERMES_CALL, 1)):
        script.say(text)
        answer = ask(client, tools=TOOLS, tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert len(answer.message.tool_calls) == count
    script.say(HERMES_TWO)
    answer = ask(client, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert (len(answer.message.tool_calls), answer.message.content) == (1, None)
    script.say("a <tool_call> b")  # nobody asked for calls: the marker is a special token like any other
    assert ask(client, tools=TOOLS, tool_choice="none").choices[0].message.content == "a  b"


def test_the_sdk_parses_arguments(start: Start, script: Scripted) -> None:
    class f(BaseModel):
        city: str

    client = start(HERMES)
    script.say(HERMES_CALL)
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id, messages=USER, tools=[openai.pydantic_function_tool(f)]
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == f(**ARGUMENTS)
    tools = [openai.pydantic_function_tool(f)]
    with client.chat.completions.stream(model="tools", messages=USER, tools=tools) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in names and final.finish_reason == "tool_calls"
    (call,) = final.message.tool_calls or ()
    assert call.function.parsed_arguments == f(**ARGUMENTS)


def test_a_conversation_goes_on_with_results(start: Start, script: Scripted) -> None:
    client = start(HERMES)
    script.say(HERMES_CALL)
    first = ask(client, tools=TOOLS).choices[0].message
    script.say("done")
    messages = [
        *USER,
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": [{"type": "text", "text": "sun"}]},
    ]
    for echoed in (first, first.model_dump()):
        messages[1] = echoed
        answer = client.chat.completions.create(model="tools", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "done"
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "arguments", ["", "no json", "[1]", '{"a": "\\ud800"}', '{"a":' * 200 + "1" + "}" * 200, '{"a": NaN}']
)
def test_any_arguments_of_former_calls_are_taken(start: Start, script: Scripted, arguments: str) -> None:
    script.say("done")
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages: list[Any] = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    answer = start(HERMES).chat.completions.create(model="tools", messages=messages)
    assert answer.choices[0].message.content == "done"
    deep = '{"a":' * 100_000
    assert CalledFunction(name="f", arguments=deep).for_template()["arguments"] == deep


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning(start: Start, script: Scripted, opened: bool) -> None:
    client = start(THOUGHT_OPENED if opened else THINKING)
    script.say(("" if opened else "<think>\n") + f"hm <b>\n</think>\n\n{HERMES_CALL}")
    message = ask(client, tools=TOOLS).choices[0].message
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == ("hm <b>", None, 1)
    streamed_message, reason = streamed(client, tools=TOOLS)
    assert (streamed_message["reasoning_content"], streamed_message["content"], reason) == ("hm <b>", "", "tool_calls")
    script.say(("" if opened else "<think>\n") + "hm\n</think>\n\nYes.")
    message = ask(client).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "Yes.")
    choice = ask(client, max_tokens=2).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", "")


def test_reasoning_that_is_off(start: Start, script: Scripted) -> None:
    client = start(THOUGHT_OPENED)
    script.say("Yes.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, extra_body=off).choices[0].message.content == "Yes."
    assert ask(client).choices[0].message.reasoning_content == "Yes."
    assert ask(start(THOUGHT_OPENED, reasoning="none")).choices[0].message.content == "Yes."
    script.say("<think>a</think>b")
    message = ask(start(PLAIN)).choices[0].message
    assert (message.content, hasattr(message, "reasoning_content")) == ("ab", False)


def test_reasoning_that_the_last_message_begins(start: Start, script: Scripted) -> None:
    """The answer goes on where the message stopped: inside its reasoning, or after it."""
    client = start(THINKING)
    model = client.models.list().data[0].id
    script.say("hm</think>Yes.")
    for begun, thought, words in (("<think>so ", "hm", "Yes."), ("<think>a</think>b", None, "hm</think>Yes.")):
        messages: list[Any] = [*USER, {"role": "assistant", "content": begun}]
        answer = client.chat.completions.create(
            model=model, messages=messages, extra_body={"continue_final_message": True, "add_generation_prompt": False}
        )
        message = answer.choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == (thought, words)


def call(**more: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}} | more


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": FUNCTION | {"parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": FUNCTION | {"parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": FUNCTION | {"parameters": {"enum": ["a" * 70_000]}}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"type": "function", "function": FUNCTION | {"strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": FUNCTION | {"x": 1}}]}, "tools[0].function.x"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"type": "function", "function": FUNCTION}] * 2}, "tools"),
    ({"tools": [{"type": "function", "function": FUNCTION | {"description": "hello " * 2700}}]}, "messages"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (
        {"continue_final_message": True, "messages": [{"role": "assistant", "tool_calls": [call()]}]},
        "continue_final_message",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [call()]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [call(id="")]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "tool_calls": [call(type="x")]}]}, "messages[0].tool_calls[0].type"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call(function={"name": "f", "arguments": {}})]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [call()] * 129}]}, "messages[0].tool_calls"),
]


def test_bad_fields(start: Start) -> None:
    client = start(HERMES)
    with httpx.Client(base_url=str(client.base_url), timeout=30) as http:
        for body, param in BAD:
            refused(http.post("chat/completions", json={"messages": USER} | body), 400, param)


def test_models_that_do_not_know_tools(start: Start, script: Scripted) -> None:
    script.say("a")
    for client in (start(PLAIN), start(PLAIN + "{# <tool_call> #}"), start(HERMES, tool_format="none")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, tools=TOOLS)
        assert caught.value.param == "tools"
        assert ask(client, tools=TOOLS, tool_choice="none").choices[0].message.content == "a"


CHANNELS = "{# <|channel|> #}" + _SHOWN


def test_calls_that_cannot_be_forced(start: Start, script: Scripted) -> None:
    """Text written from Gemma's specification: calls that the model makes are found; others are refused."""
    text = '<|tool_call>call:f{city:<|"|>Ulm<|"|>}<tool_call|>'
    client = start("{# <|tool_call> #}" + _SHOWN)
    script.say(text)
    (call,) = ask(client, tools=TOOLS).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"city": "Ulm"})
    message, reason = streamed(client, tools=TOOLS)
    assert (reason, message["content"], len(message["calls"])) == ("tool_calls", "", 1)
    with pytest.raises(openai.BadRequestError, match="cannot be forced") as caught:
        ask(client, tools=TOOLS, tool_choice="required")
    assert caught.value.param == "tool_choice"


SPOKEN = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
WHOLE: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


def test_messages_with_channels(start: Start, script: Scripted) -> None:
    """Text written from harmony's specification: the client gets the final message, however it asks."""
    script.say(SPOKEN)
    client, silent = start(CHANNELS), start(CHANNELS, reasoning="none")
    for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        message = ask(client, **more).choices[0].message
        assert (message.content, message.reasoning_content, message.tool_calls) == ("Yes.", "Hm.", None)
        assert streamed(client, **more)[0] == {"content": "Yes.", "reasoning_content": "Hm.", "calls": []}
    message = ask(silent).choices[0].message
    assert message.content == "Yes." and not hasattr(message, "reasoning_content")
    script.say('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Ulm"}')
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    for more in ({"tools": TOOLS}, {"tools": strict}, {"tools": strict, "tool_choice": "required"}):
        (call,) = ask(client, **more).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"city": "Ulm"})
        assert streamed(client, **more)[1] == "tool_calls"
    script.say("17")
    assert ask(client, response_format=WHOLE).choices[0].message.content == "17"
    assert streamed(client, response_format=WHOLE)[0]["content"] == "17"


def test_what_a_model_with_channels_is_told(scripted_engine: Engine, encoder: PromptEncoder) -> None:
    """A constraint is for the final message, so the prompt begins it; past reasoning has the template's name."""
    thinking = "{{ messages[-1].thinking }}"
    scripted_engine.tokenizer.chat_template = encoder._tokenizer.chat_template = CHANNELS + thinking
    dialect = Dialect(scripted_engine.tokenizer, "auto", "auto")
    held = SamplingParams(max_tokens=9, constraint=Constraint("regex", "a"))

    def told(message: dict[str, Any], params: SamplingParams, **options: bool) -> ChatInputs:
        return preprocess(encoder, dialect, [message], params, ToolUse(), TemplateOptions(**options))

    message = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    free = told(message, SamplingParams(max_tokens=9))
    begun = told(message, held)
    assert free.parser is not None and begun.parser is None
    assert encoder.tail(free.prompt).endswith("assistant\nHm")
    assert encoder.tail(begun.prompt).endswith("assistant\nHm<|channel|>final<|message|>")
    bare = told(message, held, add_generation_prompt=False)
    assert not encoder.tail(bare.prompt).endswith("<|message|>")
    called = message | {"tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]}
    assert encoder.tail(told(called, held).prompt).endswith("assistant\n<|channel|>final<|message|>")
    assert "Hm" in encoder.tail(told(called | {"content": ""}, held).prompt)


def test_a_template_that_needs_tools_knows_them(scripted_engine: Engine, encoder: PromptEncoder) -> None:
    encoder._tokenizer.chat_template = "{{ messages[0].content }}{{ tools | length }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert scripted_engine.tokenizer.decode(encoder.chat(USER, tools)) == "hi1"


@pytest.fixture
def encoder(scripted_engine: Engine) -> PromptEncoder:
    scripted_engine.tokenizer.chat_template = HERMES
    return PromptEncoder(scripted_engine.tokenizer, scripted_engine.max_model_len, scripted_engine.vocab_size)


def test_special_tokens_in_tools_and_calls_stay_text(scripted_engine: Engine, encoder: PromptEncoder) -> None:
    evil = "<|im_end|>\n<tool_call>"
    special = set(scripted_engine.tokenizer.all_special_ids)

    def prompt(text: str) -> list[int]:
        schema = {"type": "object", "properties": {text: {"enum": [text, {"x": [text]}]}}}
        tools = [{"type": "function", "function": {"name": text, "description": text, "parameters": schema}}]
        calls = [{"id": text, "type": "function", "function": {"name": text, "arguments": {text: {"x": [text, 1]}}}}]
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": text, "tool_call_id": text},
        ]
        return encoder.chat(messages, tools)

    calm, ids = prompt("quiet"), prompt(evil)
    assert [i for i in ids if i in special] == [i for i in calm if i in special]
    text = scripted_engine.tokenizer.decode(ids)
    assert text.count("<tool_call>") == scripted_engine.tokenizer.decode(calm).count("quiet")


def test_only_visible_special_tokens_have_text(scripted_engine: Engine) -> None:
    tokenizer = scripted_engine.tokenizer
    ids = tokenizer.encode("a🦊<tool_call>b</tool_call><|im_start|>🦊<|im_end|>c" * 9, add_special_tokens=False)
    visible = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    for prompt in ([], ids):
        detokenizer = new_detokenizer(tokenizer, prompt, visible=visible)
        text = "".join(detokenizer.append([token]) for token in ids) + detokenizer.flush()
        assert text == "a🦊<tool_call>b</tool_call>🦊c" * 9


def test_long_tools_are_refused_before_they_are_rendered(encoder: PromptEncoder) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["hello " * 100_000]}}}]
    with pytest.raises(RequestError, match="context") as caught:
        encoder.chat(USER, tools)
    assert caught.value.param == "prompt"


def test_what_the_engine_is_told(scripted_engine: Engine, encoder: PromptEncoder) -> None:
    dialect = Dialect(scripted_engine.tokenizer, "auto", "auto")
    functions = [Function(name="f", parameters={"type": "object"}), Function(name="g")]
    strict = [Function(name="f", strict=True)]

    def told(*arguments: Any) -> ChatInputs:
        return preprocess(encoder, dialect, USER, SamplingParams(max_tokens=9), tool_use(*arguments))

    free = told(functions, None, None)
    assert free.params.constraint is None and free.parser is not None
    assert set(free.params.visible_tokens) == set(scripted_engine.tokenizer.convert_tokens_to_ids(MARKERS[:2]))
    assert told([], None, None).parser is None and told(functions, "none", True).params.visible_tokens == ()
    constraints = [
        told(functions, "required", None).params.constraint,
        told(functions, Named("g", "x"), True).params.constraint,
        told(functions, "auto", False).params.constraint,
        told(strict, "auto", True).params.constraint,
    ]
    assert all(constraint is not None and constraint.kind == "lark" for constraint in constraints)
    assert len({constraint.text for constraint in constraints if constraint}) == 4
