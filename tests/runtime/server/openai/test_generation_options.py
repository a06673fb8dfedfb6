"""Options of a generation through the real server: biases, best_of, prompt_logprobs, beams, timeouts, intervals."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from qserve.runtime.engine import Engine
from qserve.runtime.sampling import NUMBERS, REQUEST_FIELDS
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle

HEADERS = {"Authorization": "Bearer first-key"}
USER = {"role": "user", "content": "hello world"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def post(server: ServerHandle, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{path}", json=body, headers=HEADERS, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def tokens_of(choice: dict[str, Any]) -> list[str]:
    return list(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_logit_bias(server: ServerHandle, path: str) -> None:
    asked = GREEDY | ({"prompt": "the quick"} if path == "/completions" else {"messages": [USER]})
    (wanted,) = server.service.encoder.encode("q")
    for value in (100, 100.0):
        choice = post(server, path, asked | {"logit_bias": {str(wanted): value}})["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) == "q" * 12
    plain = post(server, path, asked)["choices"][0]
    for nothing in ({}, None):
        assert post(server, path, asked | {"logit_bias": nothing})["choices"][0] == plain


def test_a_message_is_continued(server: ServerHandle, engine: Engine) -> None:
    """The prompt ends inside the last message, as ``/tokenize`` shows it, and the answer is what comes next."""
    messages = [USER, {"role": "assistant", "content": "the quick brown"}]
    begun = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = post(server, "/../tokenize", begun)["tokens"]
    assert engine.tokenizer.decode(tokens).endswith("<|im_start|>assistant\nthe quick brown")
    answer = post(server, "/chat/completions", GREEDY | begun)
    plain = post(server, "/completions", GREEDY | {"prompt": tokens})
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    whole = post(server, "/../tokenize", {"messages": messages})["tokens"]
    closed = post(server, "/../tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]
    assert len(tokens) < len(closed) < len(whole) and whole[: len(closed)] == closed


def test_a_bias_on_every_token_changes_nothing(server: ServerHandle, engine: Engine) -> None:
    if engine.vocab_size > 1024:
        pytest.skip("a bias may name 1,024 tokens")
    everything = {str(token): -100 for token in range(engine.vocab_size)}
    asked = GREEDY | {"prompt": "the quick", "logprobs": 1}
    plain = post(server, "/completions", asked)
    assert post(server, "/completions", asked | {"logit_bias": everything})["choices"] == plain["choices"]


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_masks_of_tokens(server: ServerHandle, engine: Engine, path: str) -> None:
    asked = {"max_tokens": 24} | ({"prompt": "the quick"} if path == "/completions" else {"messages": [USER]})

    def text(**more: Any) -> str:
        choice = post(server, path, asked | more)["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])

    encode = server.service.encoder.encode
    allowed = encode("fox") + encode(" lazy")
    for seed in range(4):
        found = text(allowed_token_ids=allowed, seed=seed)
        assert set(encode(found)) <= set(allowed) and found, found
    only = encode("q") + encode("x")
    assert text(allowed_token_ids=only, bad_words=["q"]) == "x" * 24
    special = engine.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert text(allowed_token_ids=[special], skip_special_tokens=False) == "<|im_start|>" * 24
    assert text(allowed_token_ids=only, spaces_between_special_tokens=True)
    for field, value in (("spaces_between_special_tokens", False), ("allowed_token_ids", [engine.vocab_size])):
        response = httpx.post(f"{server.url}{path}", json=asked | {field: value}, headers=HEADERS, timeout=60)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    response = httpx.post(
        f"{server.url}{path}", json=asked | {"allowed_token_ids": encode("q"), "bad_words": ["q"]}, headers=HEADERS
    )
    assert response.status_code >= 400 and "bad_words leaves no token" in response.json()["error"]["message"]


IDLE: dict[str, dict[str, tuple[Any, Any]]] = {
    "/completions": {"add_special_tokens": (True, False)},
    "/chat/completions": {
        "add_special_tokens": (False, True),
        "documents": ([], [{"title": "a", "text": "b"}]),
        "echo": (False, True),
        "include_reasoning": (True, False),
        "mm_processor_kwargs": ({}, {"a": 1}),
    },
}


@pytest.mark.parametrize("path", IDLE)
def test_fields_of_vllm_that_ask_for_nothing_are_taken(server: ServerHandle, path: str) -> None:
    both = {
        "kv_transfer_params": (None, {"a": 1}),
        "return_token_ids": (False, True),
        "return_tokens_as_token_ids": (False, True),
        "vllm_xargs": ({}, {"a": 1}),
    }
    asked = {"max_tokens": 2} | ({"prompt": "the quick"} if path == "/completions" else {"messages": [USER]})
    fields = both | IDLE[path]
    post(server, path, asked | {name: idle for name, (idle, _) in fields.items()})
    for name, (_, value) in fields.items():
        response = httpx.post(f"{server.url}{path}", json=asked | {name: value}, headers=HEADERS, timeout=60)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name) and "not supported" in error["message"]


def test_the_end_of_a_prompt_is_kept(server: ServerHandle, engine: Engine) -> None:
    context = engine.max_model_len
    text = "the quick brown fox and the lazy dog " * 100
    ids = engine.tokenizer(text)["input_ids"]
    assert len(ids) > context
    for asked, kept in ((9, 9), (-1, context - 12)):
        cut = GREEDY | {"truncate_prompt_tokens": asked, "logprobs": 0, "echo": True}
        want = post(server, "/completions", GREEDY | {"prompt": ids[-kept:], "logprobs": 0, "echo": True})
        for prompt in (text, ids):
            got = post(server, "/completions", cut | {"prompt": prompt})
            assert got["choices"] == want["choices"] and got["usage"] == want["usage"]
    messages = [{"role": "user", "content": text}]
    chat = post(server, "/chat/completions", GREEDY | {"messages": messages, "truncate_prompt_tokens": -1})
    assert chat["usage"]["prompt_tokens"] == context - 12
    for more in ({"truncate_prompt_tokens": context + 1}, {"truncate_prompt_tokens": 0}):
        body = GREEDY | {"messages": [USER]} | more
        refused = httpx.post(f"{server.url}/chat/completions", json=body, headers=HEADERS, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    body = GREEDY | {"messages": [{"role": "user", "content": "a" * 200_000}], "truncate_prompt_tokens": 9}
    refused = httpx.post(f"{server.url}/chat/completions", json=body, headers=HEADERS, timeout=60)
    if engine.max_model_len <= 512 and engine.vocab_size < 1000:
        assert refused.status_code == 400 and "can be truncated here" in refused.json()["error"]["message"]


def test_best_of_keeps_the_likeliest(server: ServerHandle) -> None:
    asked = {"prompt": ["the quick", "lazy dog"], "max_tokens": 10, "seed": 5, "ignore_eos": True, "temperature": 1.5}
    every = post(server, "/completions", asked | {"n": 6, "logprobs": 0})
    best = post(server, "/completions", asked | {"n": 2, "best_of": 6, "logprobs": 0})
    plain = post(server, "/completions", asked | {"n": 2, "best_of": 6})
    mean = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / 10  # noqa: E731
    for prompt in range(2):
        ranked = sorted(every["choices"][6 * prompt : 6 * prompt + 6], key=mean, reverse=True)
        kept = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in kept] == [choice["text"] for choice in ranked[:2]]
        assert [tokens_of(choice) for choice in kept] == [tokens_of(choice) for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in plain["choices"]] == [choice["text"] for choice in best["choices"]]
    assert all(choice["logprobs"] is None for choice in plain["choices"])
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 120
    assert best["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]
    same = post(server, "/completions", GREEDY | {"prompt": "the", "best_of": 1, "stream": False})
    assert len(same["choices"]) == 1


def test_min_tokens_holds_the_end_back(server: ServerHandle, engine: Engine) -> None:
    eos = {str(token): 100 for token in engine.eos_token_ids}
    asked = {"prompt": "the", "max_tokens": 9, "temperature": 0.0, "logit_bias": eos}
    assert post(server, "/completions", asked)["usage"]["completion_tokens"] == 1
    assert post(server, "/completions", asked | {"min_tokens": 5})["usage"]["completion_tokens"] == 6


def test_prompt_logprobs(server: ServerHandle) -> None:
    ids = server.service.encoder.encode("the lazy dog and the fox")
    asked = GREEDY | {"prompt": ids}
    echoed = post(server, "/completions", asked | {"echo": True, "logprobs": 2})["choices"][0]["logprobs"]
    for more in ({}, {"logprobs": 0}, {"n": 2}, {"echo": True}):
        for choice in post(server, "/completions", asked | {"prompt_logprobs": 2} | more)["choices"]:
            first, *found = choice["prompt_logprobs"]
            assert first is None and len(found) == len(ids) - 1
            values = [position[str(token)]["logprob"] for token, position in zip(ids[1:], found)]
            assert values == echoed["token_logprobs"][1 : len(ids)]
            assert all(2 <= len(position) <= 3 for position in found)
            assert all({1, 2} <= {entry["rank"] for entry in position.values()} for position in found)
            assert found[0][str(ids[1])]["decoded_token"] == echoed["tokens"][1]
            if "logprobs" in more:
                assert len(tokens_of(choice)) == 12
    chat = post(server, "/chat/completions", GREEDY | {"messages": [USER], "prompt_logprobs": 0, "logprobs": True})
    prompt = server.service.encoder.chat([USER])
    assert chat["prompt_logprobs"][0] is None
    assert [list(position) for position in chat["prompt_logprobs"][1:]] == [[str(token)] for token in prompt[1:]]
    assert len(chat["choices"][0]["logprobs"]["content"]) == 12
    single = post(server, "/completions", GREEDY | {"prompt": [5], "prompt_logprobs": 1})
    assert single["choices"][0]["prompt_logprobs"] == [None]
    assert "prompt_logprobs" not in post(server, "/completions", asked)["choices"][0]


def test_choices_share_what_is_computed_of_their_prompt(server: ServerHandle, engine: Engine) -> None:
    """Each of them tells it, in ``prompt_logprobs`` and in an echo, whole and in a stream."""
    ids = [token % 100 + 7 for token in range(100)]
    before = engine.journal.prompt_tokens
    asked = {"prompt": [ids, ids[:50]], "n": 16, "max_tokens": 4, "ignore_eos": True}
    choices = post(server, "/completions", asked | {"prompt_logprobs": 2})["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [100] * 16 + [50] * 16
    assert engine.journal.prompt_tokens - before < 150 + 32 * 16
    echoing = asked | {"echo": True, "logprobs": 1}
    told = {}
    for choice in post(server, "/completions", echoing)["choices"]:
        told[choice["index"]] = choice["logprobs"]["token_logprobs"]
    assert [len(told[index]) for index in range(32)] == [104] * 16 + [54] * 16
    assert told[0][1:100] == told[15][1:100] and told[16][1:50] == told[31][1:50]
    streamed: dict[int, list[float]] = {}
    with httpx.stream("POST", f"{server.url}/completions", json=echoing | {"stream": True}, headers=HEADERS) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice["logprobs"]:
                        streamed.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert [len(streamed[index]) for index in range(32)] == [104] * 16 + [54] * 16
    assert streamed[15][:100] == told[0][:100]


def test_beam_search(server: ServerHandle, client: openai.OpenAI, model: str) -> None:
    extra = {"use_beam_search": True, "ignore_eos": True, "length_penalty": 0.0}
    answer = client.completions.create(
        model=model, prompt=["the quick", "lazy"], n=4, max_tokens=8, logprobs=0, extra_body=extra
    )
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert all(choice.finish_reason == "length" for choice in answer.choices)
    for prompt in range(2):
        own = [choice.logprobs for choice in answer.choices[4 * prompt : 4 * prompt + 4]]
        totals = [sum(value or 0.0 for value in each.token_logprobs or []) for each in own if each]
        assert totals == sorted(totals, reverse=True) and len({tuple(each.tokens or ()) for each in own if each}) == 4
    assert answer.usage is not None and answer.usage.completion_tokens == 64
    greedy = post(server, "/chat/completions", GREEDY | {"messages": [USER]})
    beam = post(server, "/chat/completions", GREEDY | {"messages": [USER], "use_beam_search": True})
    assert beam["choices"] == greedy["choices"]


def test_timeout_while_it_runs(server: ServerHandle, slow: None) -> None:
    asked = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "timeout": 0.5}
    start = time.monotonic()
    response = httpx.post(f"{server.url}/completions", json=asked | {"n": 2}, headers=HEADERS, timeout=60)
    assert time.monotonic() - start < 8.0
    assert response.status_code == 408 and response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("timeout", "timeout", "timeout")
    streamed = asked | {"stream": True}
    with httpx.stream("POST", f"{server.url}/completions", json=streamed, headers=HEADERS, timeout=60) as stream:
        assert stream.status_code == 200
        events = [line for line in stream.iter_lines() if line]
    assert len(events) > 3 and "choices" in json.loads(events[0][6:])
    assert json.loads(events[-1][6:])["error"]["type"] == "timeout"
    done = post(server, "/completions", {"prompt": "the", "max_tokens": 3, "timeout": 60, "ignore_eos": True})
    assert done["usage"]["completion_tokens"] == 3


def test_timeout_while_it_waits(engine: Engine, server: ServerHandle, slow: None) -> None:
    many = {"prompt": ["the"] * engine.config.max_num_seqs, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", f"{server.url}/completions", json=many, headers=HEADERS, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        late = {"prompt": "hello", "max_tokens": 4, "timeout": 0.2, "stream": True}
        response = pool.submit(
            lambda: httpx.post(f"{server.url}/completions", json=late, headers=HEADERS, timeout=60)
        ).result()
        assert response.status_code == 408 and response.json()["error"]["type"] == "timeout"
        assert [line for line in lines if line][-1] == "data: [DONE]"  # the others do not notice


@pytest.fixture
def gathering(engine: Engine) -> Iterator[ServerHandle]:
    with ServerHandle(engine, config=ServerConfig(stream_interval=5)) as handle:
        yield handle
    engine.check()


def test_stream_interval(gathering: ServerHandle) -> None:
    asked = GREEDY | {"prompt": "the quick", "max_tokens": 23, "n": 2, "logprobs": 1}
    whole = post(gathering, "/completions", asked)
    with httpx.stream("POST", f"{gathering.url}/completions", json=asked | {"stream": True}, timeout=60) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        counts = [len(chunk["logprobs"]["tokens"]) for chunk in own if chunk["logprobs"]]
        assert counts == [1, 5, 5, 5, 5, 2]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert [token for chunk in own if chunk["logprobs"] for token in tokens_of(chunk)] == tokens_of(choice)
        assert own[-1]["finish_reason"] == "length"


def test_what_was_gathered_goes_out_before_an_error(
    engine: Engine, gathering: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = engine.runner.run, 0

    def fail_at_ninth(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 9:
            raise RuntimeError("a kernel broke")
        return run(*arguments)

    monkeypatch.setattr(engine.runner, "run", fail_at_ninth)
    asked = GREEDY | {"prompt": "the quick", "logprobs": 0, "stream": True}
    with httpx.stream("POST", f"{gathering.url}/completions", json=asked, timeout=60) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line]
    assert sum(len(tokens_of(event["choices"][0])) for event in events[:-1]) == 8
    assert events[-1]["error"]["type"] == "server_error"


def test_penalties_of_a_seen_token_are_finite(server: ServerHandle) -> None:
    """Biases and every penalty at their ends, together."""
    asked = {"prompt": "the", "max_tokens": 8, "ignore_eos": True, "seed": 1, "logprobs": 1}
    penalties = {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 10}
    answer = post(server, "/completions", asked | penalties | {"logit_bias": {"7": 100, "8": -100}})["choices"][0]
    assert len(tokens_of(answer)) == 8 and all(map(math.isfinite, answer["logprobs"]["token_logprobs"]))


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
@pytest.mark.parametrize("name", sorted(NUMBERS.keys() & set(REQUEST_FIELDS)))
def test_numbers_of_the_sampling_parameters_are_fields_with_their_bounds(
    server: ServerHandle, path: str, name: str
) -> None:
    asked = {"max_tokens": 2} | ({"prompt": "the quick"} if path == "/completions" else {"messages": [USER]})
    bounds, timeout = NUMBERS[name].bounds, 60
    post(server, path, asked | {name: max(bounds.low, 1)})
    beyond = asked | {name: bounds.high + 1 if bounds.high < 2**62 else -1.5}
    refused = httpx.post(f"{server.url}{path}", json=beyond, headers=HEADERS, timeout=timeout)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_one_sigma_of_nothing_is_the_likeliest_token(server: ServerHandle) -> None:
    asked = GREEDY | {"prompt": "the quick"}
    narrow = asked | {"temperature": 100.0, "top_n_sigma": 1e-6}
    assert post(server, "/completions", narrow)["choices"] == post(server, "/completions", asked)["choices"]
