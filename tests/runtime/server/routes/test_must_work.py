"""Odd requests that are allowed: they work, and mean what they say."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from ..scripted import PLAIN, Scripted, Start

TREE = {
    "type": "object",
    "properties": {"name": {"enum": ["leaf", "node"]}, "of": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
    "required": ["name"],
    "additionalProperties": False,
}
FAMILY = "so 👩\u200d👧 and 👩🏽 end"


def test_a_temperature_of_practically_zero_is_greedy(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "the quick", "max_tokens": 24}
    greedy, almost = (client.completions.create(**asked, temperature=t).choices[0].text for t in (0, 1e-12))
    assert almost == greedy


def test_nested_repetition_is_no_trap(client: openai.OpenAI, model: str) -> None:
    for seed in range(3):
        (choice,) = client.completions.create(
            model=model, prompt="a", max_tokens=64, seed=seed, extra_body={"guided_regex": "(a+)+b"}
        ).choices
        assert re.fullmatch("a+b" if choice.finish_reason == "stop" else "a*", choice.text)


def test_a_schema_that_refers_to_itself(client: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "tree", "schema": TREE}}
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "a tree"}],
        response_format=form,
        n=4,
        seed=1,
        max_tokens=200,
    )
    ended = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), TREE)


@pytest.mark.parametrize("prompt", [511, 512])
def test_a_chat_of_nearly_and_of_exactly_the_context(start: Start, script: Scripted, prompt: int) -> None:
    client = start(PLAIN)
    script.say("a" * 3000)
    context = client.models.list().data[0].max_model_len  # type: ignore[attr-defined]
    empty = client.chat.completions.create(model="tools", messages=[{"role": "user", "content": "1"}], max_tokens=1)
    assert empty.usage is not None
    content = "1" * (context - 512 + prompt - empty.usage.prompt_tokens + 1)
    answer = client.chat.completions.create(model="tools", messages=[{"role": "user", "content": content}])
    assert answer.usage is not None and answer.usage.prompt_tokens == context - 512 + prompt
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 1)


@pytest.mark.parametrize("stop", ["\u200d👧", "👧", "🏽", "👩🏽", " end"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_inside_an_emoji(start: Start, script: Scripted, stop: str, stream: bool) -> None:
    client = start(PLAIN)
    assert script.say(FAMILY) > len(FAMILY) + 5, "emoji take several tokens each"
    asked: dict[str, Any] = {"model": "tools", "messages": [{"role": "user", "content": "a"}], "stop": stop}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.chat.completions.create(**asked).choices
        text, reason = choice.message.content or "", choice.finish_reason
    assert (text, reason) == (FAMILY[: FAMILY.index(stop)], "stop")
