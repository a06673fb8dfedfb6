"""The official client against the real server: whole answers, streams, many at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from qserve.runtime.server.serve import ServerHandle

KEY = "first-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHAT = [{"role": "system", "content": "be the fox"}, {"role": "user", "content": "hello world"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def frames(server: ServerHandle, path: str, body: dict[str, Any]) -> list[Any]:
    """The ``data:`` lines of a stream, parsed; every frame must be one such line and a blank one."""
    with httpx.stream("POST", f"{server.url}{path}", json=body | {"stream": True}, headers=HEADERS, timeout=60) as r:
        assert r.status_code == 200
        assert r.headers["content-type"].startswith("text/event-stream")
        text = r.read().decode()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event[6:]) for event in events[:-1]]


def test_completion(client: openai.OpenAI, model: str, server: ServerHandle) -> None:
    answer = client.completions.create(model=model, prompt="the quick brown", **GREEDY)
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.text
    assert answer.usage is not None
    prompt = len(server.service.encoder.encode("the quick brown"))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 24, prompt + 24)


def test_stream_is_the_whole_in_pieces(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="the lazy dog", **GREEDY).choices[0].text
    chunks = list(client.completions.create(model=model, prompt="the lazy dog", stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert len(chunks) > 3
    said = client.chat.completions.create(model=model, messages=CHAT, **GREEDY).choices[0].message.content
    pieces = client.chat.completions.create(model=model, messages=CHAT, stream=True, **GREEDY)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said


def test_default_max_tokens_of_a_completion_is_16(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="hello", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_token_ids_and_lists_of_prompts(client: openai.OpenAI, model: str, server: ServerHandle) -> None:
    texts = ["the quick", "lazy dog", "hello world"]
    ids = [server.service.encoder.encode(text) for text in texts]
    single = [client.completions.create(model=model, prompt=t, **GREEDY).choices[0].text for t in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model=model, prompt=prompt, n=2, **GREEDY)  # type: ignore[arg-type]
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == [text for text in single for _ in range(2)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 6 * 24
    assert client.completions.create(model=model, prompt=ids[0], **GREEDY).choices[0].text == single[0]


def test_chat_stream_frames(server: ServerHandle) -> None:
    body = {"messages": CHAT, "max_tokens": 8, "n": 2, "ignore_eos": True, "seed": 3}
    chunks = frames(server, "/chat/completions", body)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}
        assert all(choice["delta"].keys() == {"content"} for choice in own[1:-1])


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_usage_chunk_only_when_asked(server: ServerHandle, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
    body |= {"prompt": "the fox"} if path == "/completions" else {"messages": CHAT}
    chunks = frames(server, path, body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for off in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all(chunk["choices"] and "usage" not in chunk for chunk in frames(server, path, body | off))


def test_stop_string_split_across_tokens(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="quick", **GREEDY).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    cut = whole.index(stop)
    for stream in (False, True):
        answer = client.completions.create(model=model, prompt="quick", stop=[stop, "never"], stream=stream, **GREEDY)
        if stream:
            chunks = list(answer)
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:cut]
            end = chunks[-1].choices[0]
        else:
            end = answer.choices[0]  # type: ignore[union-attr]
            assert end.text == whole[:cut]
        assert end.finish_reason == "stop"
        assert end.stop_reason == stop  # type: ignore[attr-defined]
    extra = {"ignore_eos": True, "include_stop_str_in_output": True}
    kept = client.completions.create(
        model=model, prompt="quick", stop=stop, temperature=0, max_tokens=24, extra_body=extra
    )
    assert kept.choices[0].text == whole[: cut + len(stop)]


def test_seed_repeats_and_choices_differ(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "seed": 7, "n": 3, "max_tokens": 20, "temperature": 1.5}
    first, second = (client.chat.completions.create(model=model, **asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3


def test_completion_logprobs(client: openai.OpenAI, model: str) -> None:
    for stream in (False, True):
        answer = client.completions.create(model=model, prompt="the", logprobs=3, stream=stream, **GREEDY)
        parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]  # type: ignore[union-attr]
        parts = [part for part in parts if part is not None]
        tokens = [token for part in parts for token in part.tokens or []]
        values = [value for part in parts for value in part.token_logprobs or []]
        tops = [top for part in parts for top in part.top_logprobs or []]
        offsets = [offset for part in parts for offset in part.text_offset or []]
        assert len(tokens) == len(values) == len(tops) == len(offsets) == 24
        assert all(value is not None and value <= 0 for value in values)
        assert all(3 <= len(top) <= 4 and top[token] == value for token, value, top in zip(tokens, values, tops))
        assert all(max(top, key=top.__getitem__) == token for token, top in zip(tokens, tops))  # greedy
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
    assert client.completions.create(model=model, prompt="the", **GREEDY).choices[0].logprobs is None


def test_chat_logprobs(client: openai.OpenAI, model: str, server: ServerHandle) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "logprobs": True, **GREEDY}
    answer = client.chat.completions.create(model=model, top_logprobs=2, **asked)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 24
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert all(token.top_logprobs[0].token == token.token for token in content)
    special = server.service.encoder._tokenizer.all_special_tokens  # not shown in the text
    data = b"".join(bytes(token.bytes or []) for token in content if token.token not in special)
    assert data.decode(errors="replace") == answer.choices[0].message.content
    chunks = client.chat.completions.create(model=model, stream=True, **asked)
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert [token.token for token in streamed] == [token.token for token in content]
    assert all(token.top_logprobs == [] for token in streamed)


def test_echo(client: openai.OpenAI, model: str, server: ServerHandle) -> None:
    plain = client.completions.create(model=model, prompt="the lazy", **GREEDY).choices[0].text
    ids = server.service.encoder.encode("the lazy")
    for prompt in ("the lazy", ids):
        echoed = client.completions.create(model=model, prompt=prompt, echo=True, **GREEDY)
        assert echoed.choices[0].text == "the lazy" + plain
    chunks = list(client.completions.create(model=model, prompt="the lazy", echo=True, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the lazy" + plain


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, model: str, server: ServerHandle) -> None:
    """What lm-eval's loglikelihood asks: token ids, echo, one token more."""
    ids = server.service.encoder.encode("the lazy dog and the fox")
    asked: dict[str, Any] = {"model": model, "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1}
    answer = client.completions.create(prompt=ids, **asked).choices[0]
    found = answer.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    lengths = {len(found.tokens), len(found.token_logprobs), len(found.top_logprobs), len(found.text_offset)}
    assert lengths == {len(ids) + 1}
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    for i, token in enumerate(found.tokens[:-1]):
        assert answer.text[found.text_offset[i] :].startswith(token)
    # A continuation is scored as the choices are: greedy decoding finds the most likely token everywhere.
    more = client.completions.create(model=model, prompt=ids, logprobs=1, temperature=0, max_tokens=6).choices[0]
    assert more.logprobs is not None and more.logprobs.token_logprobs
    longer = [*ids, *server.service.encoder.encode(more.text)]
    rescored = client.completions.create(prompt=longer, **asked).choices[0].logprobs
    assert rescored is not None and rescored.token_logprobs
    shared = min(len(longer) - len(ids), 6)
    if server.service.encoder.encode(more.text)[:shared] == longer[len(ids) : len(ids) + shared]:
        assert rescored.token_logprobs[len(ids)] == pytest.approx(more.logprobs.token_logprobs[0], abs=1e-5)
    streamed = client.completions.create(prompt=ids, stream=True, **asked)
    parts = [c.choices[0].logprobs for c in streamed if c.choices[0].logprobs]
    assert [t for part in parts for t in part.token_logprobs or []] == found.token_logprobs


def test_thirty_two_at_once_answer_as_alone(client: openai.OpenAI, model: str, server: ServerHandle) -> None:
    alone = [
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": f"fox {i}"}], **GREEDY)
        .choices[0]
        .message.content
        for i in range(8)
    ]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        messages = [{"role": "user", "content": f"fox {i % 8}"}]
        if i % 2:
            answer = await client.chat.completions.create(model=model, messages=messages, **GREEDY)  # type: ignore[call-overload]
            return str(answer.choices[0].message.content)
        text = ""
        stream = await client.chat.completions.create(model=model, messages=messages, stream=True, **GREEDY)  # type: ignore[call-overload]
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    assert asyncio.run(all_at_once()) == alone * 4


def test_prompt_of_exactly_the_context_works_and_one_more_does_not(client: openai.OpenAI, model: str) -> None:
    context = client.models.list().data[0].max_model_len  # type: ignore[attr-defined]
    for length in (context - 1, context):
        answer = client.completions.create(model=model, prompt=[5] * length, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=[5] * (context + 1))
    assert caught.value.param == "prompt"
    assert str(context) in caught.value.message


def test_models(client: openai.OpenAI, model: str) -> None:
    (entry,) = client.models.list().data
    assert entry.id == model
    assert "quality_card" in entry.qserve  # type: ignore[attr-defined]
    assert client.models.retrieve(model).id == model


def test_chat_content_as_text_parts_and_null_extras(client: openai.OpenAI, model: str) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    plain = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    other: list[Any] = [
        {"role": "developer", "content": "be the fox"},
        {"role": "user", "content": parts, "tool_calls": None},
    ]
    answer = client.chat.completions.create(
        model=model, messages=other, tools=[], tool_choice="none", response_format={"type": "text"}, **GREEDY
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.usage is not None and plain.usage is not None
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens  # how many were cached says who asked before
    assert answer.usage.completion_tokens == plain.usage.completion_tokens


def test_repeated_client_request_id_and_tiny_temperature(client: openai.OpenAI, model: str) -> None:
    for _ in range(2):
        answer = client.completions.create(
            model=model, prompt="the", temperature=1e-12, extra_headers={"X-Request-Id": "same"}
        )
        assert answer.choices[0].finish_reason in ("stop", "length")
