"""Requests that must be refused: quickly, with OpenAI's error object and the name of the field."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from qserve.runtime.server.http.body import parse_object
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.server.service import MORE_COMMAS, most_commas

HEADERS = {"Authorization": "Bearer second-key", "Content-Type": "application/json"}
USER = {"role": "user", "content": "hi"}
COMPLETION, CHAT = "/completions", "/chat/completions"


def refused(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 600
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["param"] == param
    return error


def post(server: ServerHandle, path: str, body: Any) -> httpx.Response:
    start = time.monotonic()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}{path}", content=content, headers=HEADERS, timeout=30)
    assert time.monotonic() - start < 5.0  # 0.05 s where nothing else runs
    return response


CASES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETION, {}, "prompt"),
    (COMPLETION, {"prompt": None}, "prompt"),
    (COMPLETION, {"prompt": 12}, "prompt"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": [[]]}, "prompt"),
    (COMPLETION, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETION, {"prompt": [1, True]}, "prompt"),
    (COMPLETION, {"prompt": [1.5]}, "prompt"),
    (COMPLETION, {"prompt": [[1], ["a"]]}, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 1025}, "prompt"),
    (COMPLETION, {"prompt": [0] * 40_000}, "prompt"),
    (COMPLETION, {"prompt": "a " * 3_000_000}, "prompt"),
    (COMPLETION, {"prompt": [-1]}, "prompt"),
    (COMPLETION, {"prompt": [10**9]}, "prompt"),
    (COMPLETION, {"prompt": [10**30]}, "prompt"),
    (COMPLETION, {"prompt": [2**33], "echo": True}, "prompt"),
    (COMPLETION, {"prompt": [[0]] * 40_000}, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 1024, "n": 2}, "n"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETION, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    (COMPLETION, {"prompt": "a", "best_of": 0}, "best_of"),
    (COMPLETION, {"prompt": "a", "best_of": 129}, "best_of"),
    (COMPLETION, {"prompt": "a", "best_of": 2, "use_beam_search": True}, "best_of"),
    (COMPLETION, {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 1}, "echo"),
    (COMPLETION, {"prompt": "a", "echo": True, "logprobs": 1, "use_beam_search": True}, "echo"),
    (COMPLETION, {"prompt": "a", "logprobs": -2}, "logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": "a"}, "logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": 10**6}, "logprobs"),
    (COMPLETION, {"prompt": "a", "prompt_embeds": "gASV"}, "prompt_embeds"),
    (COMPLETION, {"prompt": "a", "unheard_of": 1}, "unheard_of"),
    (COMPLETION, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETION, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (COMPLETION, {"prompt": "a", "priority": 10**6}, "priority"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [123]}, "messages[0]"),
    (CHAT, {"messages": [123] * 40_000}, "messages"),
    (CHAT, {"messages": [USER] * 5000}, "messages"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": 123, "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [USER, {"role": "user", "content": 123}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
        "messages[0].content",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
    ),
    (CHAT, {"messages": [USER | {"weight": 1}]}, "messages[0].weight"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 3_000_000}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "hello " * 600}]}, "messages"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": [USER], "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"messages": [USER], "functions": [{}]}, "functions"),
    (CHAT, {"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
    (CHAT, {"messages": [USER], "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": [USER], "store": True}, "store"),
    (CHAT, {"messages": [USER], "prompt": "a"}, "prompt"),
    (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": [USER], "logprobs": 1}, "logprobs"),
    (CHAT, {"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": [USER], "max_completion_tokens": 2, "max_tokens": 3}, "max_tokens"),
]
FIELDS: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", -1),
    ("n", 10**6),
    ("n", 1.5),
    ("n", True),
    ("n", "2"),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2**31),
    ("min_tokens", 20),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", ["a"] * 5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "a"),
    ("stream", "yes"),
    ("ignore_eos", 1),
    ("logit_bias", [1]),
    ("logit_bias", {"5": -101}),
    ("logit_bias", {"5": "a"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5" * 5000: 1}),
    ("logit_bias", {"10000000": 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", "a"),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", 3601),
    ("timeout", "1"),
    ("timeout", True),
    ("use_beam_search", 1),
    ("length_penalty", 11),
    ("early_stopping", "never"),
    ("temperature", [[[]]]),
]
CASES += [(COMPLETION, {"prompt": "a", "max_tokens": 8, name: value}, name) for name, value in FIELDS]
CASES += [(CHAT, {"messages": [USER], "max_tokens": 8, name: value}, name) for name, value in FIELDS]


@pytest.mark.parametrize(
    ("path", "body", "param"), CASES, ids=lambda value: value if isinstance(value, str) else f"{value!s:.60}"
)
def test_bad_field(server: ServerHandle, path: str, body: dict[str, Any], param: str) -> None:
    refused(post(server, path, body), 400, param)
    if param not in ("stream", "stream_options"):
        refused(post(server, path, body | {"stream": True}), 400, param)


@pytest.mark.parametrize("field", ["best_of", "prompt_logprobs", "use_beam_search"])
def test_what_cannot_be_streamed(server: ServerHandle, field: str) -> None:
    value = True if field == "use_beam_search" else 2
    refused(post(server, COMPLETION, {"prompt": "a", "stream": True, field: value}), 400, field)
    if field != "best_of":
        refused(post(server, CHAT, {"messages": [USER], "stream": True, field: value}), 400, field)


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("/embeddings", {}, "input"),
    ("/embeddings", {"input": ""}, "input"),
    ("/embeddings", {"input": []}, "input"),
    ("/embeddings", {"input": [1.5]}, "input"),
    ("/embeddings", {"input": [-1]}, "input"),
    ("/embeddings", {"input": [10**9]}, "input"),
    ("/embeddings", {"input": "hello " * 600}, "input"),
    ("/embeddings", {"input": ["a"] * 1025}, "input"),
    ("/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/embeddings", {"input": "a", "dimensions": 10**9}, "dimensions"),
    ("/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/embeddings", {"input": "a", "pooling": "max"}, "pooling"),
    ("/embeddings", {"input": "a", "timeout": 0}, "timeout"),
    ("/embeddings", {"input": "a", "temperature": 0}, "temperature"),
    ("/../tokenize", {}, "prompt"),
    ("/../tokenize", {"prompt": ""}, "prompt"),
    ("/../tokenize", {"prompt": 3}, "prompt"),
    ("/../tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/../tokenize", {"messages": [{}]}, "messages[0].role"),
    ("/../tokenize", {"messages": [USER], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
    ("/../tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
    ("/../tokenize", {"prompt": "a " * 3_000_000}, "prompt"),
    ("/../detokenize", {}, "tokens"),
    ("/../detokenize", {"tokens": "a"}, "tokens"),
    ("/../detokenize", {"tokens": [-1]}, "tokens"),
    ("/../detokenize", {"tokens": [10**9]}, "tokens"),
    ("/../detokenize", {"tokens": [0] * 40_000}, "tokens"),
]
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 4}
NOT_FOR_BEAMS = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 3, "stop": "a", "n": 17}
OTHERS += [
    (CHAT, {"messages": [USER], **BEAMS, "response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETION, {"prompt": "a", **BEAMS, "guided_regex": "a+"}, "guided_regex"),
]
OTHERS += [(COMPLETION, {"prompt": "a", **BEAMS, name: value}, name) for name, value in NOT_FOR_BEAMS.items()]
OTHERS += [(CHAT, {"messages": [USER], **BEAMS, name: value}, name) for name, value in NOT_FOR_BEAMS.items()]


@pytest.mark.parametrize(("path", "body", "param"), OTHERS, ids=lambda value: f"{value!s:.60}")
def test_bad_field_of_another_kind(server: ServerHandle, path: str, body: dict[str, Any], param: str) -> None:
    refused(post(server, path, body), 400, param)


BODIES: dict[str, bytes] = {
    "empty": b"",
    "no json": b"{'prompt': 1}",
    "array": b"[]",
    "string": b'"prompt"',
    "null": b"null",
    "deep list": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep unclosed": b"[" * 200_000,
    "deep object": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "a little deep": b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "duplicate": b'{"prompt": "a", "prompt": "b"}',
    "nested duplicate": b'{"prompt": "a", "stream_options": {"a": 1, "a": 1}}',
    "many duplicates": b'{"prompt": "a"' + b"".join(b', "k%d": 1' % (i % 40_000) for i in range(40_001)) + b"}",
    "high surrogate": b'{"prompt": "a\\ud800b"}',
    "low surrogate": b'{"prompt": "\\\\\\udc00"}',
    "surrogates around a backslash": b'{"prompt": "\\ud83d\\\\\\ude00"}',
    "swapped surrogates": b'{"prompt": "\\udc00\\ud800"}',
    "nul": b'{"prompt": "a\\u0000b"}',
    "raw nul": b'{"prompt": "a\x00b"}',
    "nul in key": b'{"prompt": "a", "\\u0000": 1}',
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "huge number": b'{"prompt": "a", "n": ' + b"9" * 100_000 + b"}",
    "many objects": b'{"prompt": [' + b"{}," * 52_000 + b"{}]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_bad_body(server: ServerHandle, name: str) -> None:
    refused(post(server, COMPLETION, BODIES[name]), 400, None)


def test_more_values_than_could_ever_be_served(server: ServerHandle) -> None:
    for body in ({"prompt": [0] * 2_000_000}, {"messages": [123] * 1_000_000}, {"prompt": "a", "b": [{}] * 100_000}):
        response = post(server, COMPLETION, body)
        error = response.json()["error"]
        assert response.status_code == 400 and "values" in error["message"] and error["code"] == "too_many_values"
        assert error["type"] == "invalid_request_error"


def test_a_body_of_the_most_values_stops_nobody_for_long() -> None:
    """A server of contexts of a million tokens, 32 of which may wait."""
    assert most_commas(8192, 32 * 8192) == 420_000 and most_commas(1 << 20, 32 << 20) == MORE_COMMAS + (1 << 20)
    body = b'{"prompt": [' + b"12345," * most_commas(131_072, 32 * 131_072) + b"1]}"
    began = time.thread_time()
    parse_object(body, most_commas(131_072, 32 * 131_072))
    assert time.thread_time() - began < 0.25


def test_infinite_number_names_its_field(server: ServerHandle) -> None:
    refused(post(server, COMPLETION, b'{"prompt": "a", "temperature": 1e999}'), 400, "temperature")


@pytest.mark.parametrize("text", ["\\u0000", "\\\\ud800", "😀", "\ufffd", "\\\\u0000"])
def test_text_that_only_looks_bad_is_taken(server: ServerHandle, text: str) -> None:
    assert post(server, COMPLETION, {"prompt": text, "max_tokens": 1}).status_code == 200
    escaped = b'{"prompt": "\\ud83d\\ude00 \\\\u0000", "max_tokens": 1}'
    assert post(server, COMPLETION, escaped).status_code == 200


def test_too_large_a_body(server: ServerHandle) -> None:
    body = b'{"prompt": "' + b"a" * (33 << 20) + b'"}'
    refused(post(server, COMPLETION, body), 413, None)

    def chunks() -> Any:
        for _ in range(33):
            yield b"a" * (1 << 20)

    response = httpx.post(f"{server.url}{COMPLETION}", content=chunks(), headers=HEADERS, timeout=30)
    refused(response, 413, None)


def test_huge_headers(server: ServerHandle) -> None:
    response = httpx.get(f"{server.url}/models", headers=HEADERS | {"X-Large": "a" * (64 << 10)}, timeout=30)
    refused(response, 431, None)


def test_unknown_route_method_and_model(server: ServerHandle) -> None:
    refused(httpx.get(f"{server.url}/nothing", headers=HEADERS), 404, None)
    refused(httpx.get(f"{server.url}/completions", headers=HEADERS), 405, None)
    refused(httpx.put(f"{server.url}/models", headers=HEADERS), 405, None)
    error = refused(post(server, COMPLETION, {"prompt": "a", "model": "other"}), 404, "model")
    assert error["code"] == "model_not_found"
    refused(httpx.get(f"{server.url}/models/other", headers=HEADERS), 404, "model")


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic second-key", "second-key", "Bearer é"]
)
def test_every_route_but_the_open_ones_wants_a_key(server: ServerHandle, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    base = server.url.removesuffix("/v1")
    for path in (
        "/v1/models",
        "/v1/models/x",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/static",
        "/nothing",
        "//health",
    ):
        error = refused(httpx.get(base + path, headers=headers), 401, None)
        assert error["code"] == "invalid_api_key"
    for path in (COMPLETION, CHAT):
        refused(httpx.post(server.url + path, json={"prompt": "a"}, headers=headers), 401, None)
    for path in ("/health", "/ready"):
        assert httpx.get(base + path, headers=headers).status_code == 200


def test_streams_go_on_while_bad_requests_come(server: ServerHandle, slow: None) -> None:
    body = {"prompt": "the", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}{COMPLETION}", json=body, headers=HEADERS, timeout=60) as stream:
        lines = stream.iter_lines()
        for name in ("deep list", "many objects", "nul"):
            next(lines)
            refused(post(server, COMPLETION, BODIES[name]), 400, None)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
