"""Requests that must be refused: bodies, numbers, prompts, messages, constraints and headers that no client means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_USER = {"role": "user", "content": "a"}


@dataclass(frozen=True)
class BadInput:
    """``chunked``: the body is sent without saying how long it is."""

    name: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    chunked: bool = False


def bad_inputs() -> list[BadInput]:
    """Those that are the same each time they are sent."""
    large = b'{"prompt": "' + b"a" * (33 << 20) + b'"}'
    return [
        *(BadInput(name, _COMPLETIONS, body) for name, body in _bodies(large).items()),
        BadInput("33 MiB in chunks", _COMPLETIONS, large, chunked=True),
        BadInput("a header of 64 KB", _COMPLETIONS, b'{"prompt": "a"}', {"X-Long": "a" * (64 << 10)}),
        BadInput("64 KB of headers", _COMPLETIONS, b'{"prompt": "a"}', {f"X-{i}": "a" * 500 for i in range(128)}),
        *(_json(name, _COMPLETIONS, {"prompt": "a"} | body) for name, body in _fields().items()),
        *(_json(name, _COMPLETIONS, {"prompt": "a"} | body) for name, body in _constraints().items()),
        *(_json(name, _CHAT, {"messages": [_USER]} | body) for name, body in _chats().items()),
        *(_json(name, path, body) for name, (path, body) in _elsewhere().items()),
    ]


def slow_inputs(turn: int) -> list[BadInput]:
    """Constraints that take seconds or gigabytes to compile, other ones in every ``turn``: no verdict is remembered."""
    multiple = {"type": "integer", "multipleOf": 999_983, "title": str(turn)}
    patterns = [{"type": "string", "pattern": f"^(.*x{turn}y{i}){{5}}.*$"} for i in range(200)]
    return [
        _json("a schema that compiles for seconds", _COMPLETIONS, {"prompt": "a", "guided_json": multiple}),
        _json("patterns that take gigabytes", _COMPLETIONS, {"prompt": "a", "guided_json": {"allOf": patterns}}),
    ]


def _json(name: str, path: str, body: dict[str, Any]) -> BadInput:
    return BadInput(name, path, json.dumps(body).encode())


def _bodies(large: bytes) -> dict[str, bytes]:
    return {
        "not an object": b"[]",
        "not JSON": b"{",
        "33 MiB": large,
        "200,000 levels": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "NaN": b'{"prompt": "a", "temperature": NaN}',
        "Infinity": b'{"prompt": "a", "temperature": Infinity}',
        "a number beyond the largest": b'{"prompt": "a", "temperature": 1e999}',
        "a bias of -Infinity": b'{"prompt": "a", "logit_bias": {"5": -Infinity}}',
        "a bias below the smallest number": b'{"prompt": "a", "logit_bias": {"5": -1e999}}',
        "duplicate keys": b'{"prompt": "a", "prompt": "b"}',
        "lone surrogate": b'{"prompt": "\\ud800"}',
        "NUL": b'{"prompt": "\\u0000"}',
        "not UTF-8": b'{"prompt": "\xff"}',
    }


def _fields() -> dict[str, dict[str, Any]]:
    return {
        "1,025 prompts": {"prompt": ["a"] * 1025},
        "empty prompt": {"prompt": ""},
        "negative token": {"prompt": [-1]},
        "token beyond the vocabulary": {"prompt": [10**6]},
        "more tokens than the context": {"prompt": [5] * 100_000},
        "more text than the context": {"prompt": "the quick " * 50_000},
        "prompt_embeds": {"prompt_embeds": "gASVAAAAAAAAAA=="},
        "n 0": {"n": 0},
        "n -1": {"n": -1},
        "n a million": {"n": 10**6},
        "best_of a million": {"best_of": 10**6},
        "max_tokens 0": {"max_tokens": 0},
        "max_tokens 2**31": {"max_tokens": 2**31},
        "min_tokens above max_tokens": {"min_tokens": 5, "max_tokens": 4},
        "temperature -1": {"temperature": -1},
        "temperature as text": {"temperature": "NaN"},
        "top_p 0": {"top_p": 0},
        "seed beyond int64": {"seed": 2**63},
        "logprobs -2": {"logprobs": -2},
        "logprobs a": {"logprobs": "a"},
        "logprobs a million": {"logprobs": 10**6},
        "logit_bias on no token": {"logit_bias": {"99999999": 1}},
        "logit_bias on more tokens than allowed": {"logit_bias": {str(token): -100 for token in range(200_000)}},
        "five stops": {"stop": list("abcde")},
        "empty stop": {"stop": ""},
        "empty stop among others": {"stop": ["a", ""]},
        "stop that is a number": {"stop": [5]},
        "priority": {"priority": 10**6},
        "timeout 0": {"timeout": 0},
        "unknown field": {"max_token": 4},
        "trust_remote_code": {"trust_remote_code": True},
        "another model": {"model": "gpt-7"},
    }


def _constraints() -> dict[str, dict[str, Any]]:
    return {
        "a pattern that is too long": {"guided_regex": "(a|b)" * 1000},
        "a pattern that is none": {"guided_regex": "(a"},
        "an enum beyond the limit": {"guided_json": {"enum": list(range(1001))}},
        "too many choices": {"guided_choice": [str(i) for i in range(1001)]},
        "a schema that is too large": {"guided_json": {"description": "a" * 70_000}},
        "a schema that nothing satisfies": {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}},
        "a schema elsewhere": {"guided_json": {"$ref": "http://127.0.0.1/schema"}},
        "a schema of no type": {"guided_json": {"type": 3}},
        "a grammar with a missing rule": {"guided_grammar": 'start: "a" missing'},
        "a grammar nested deeply": {"guided_grammar": "root ::= " + "(" * 50_000},
        "two constraints": {"guided_regex": "a", "guided_choice": ["a"]},
    }


def _chats() -> dict[str, dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return {
        "messages null": {"messages": None},
        "messages text": {"messages": "a"},
        "messages numbers": {"messages": [123]},
        "messages empty object": {"messages": [{}]},
        "more messages than allowed": {"messages": [_USER] * 5000},
        "role 123": {"messages": [_USER | {"role": 123}]},
        "content 123": {"messages": [_USER | {"content": 123}]},
        "image URL": {"messages": [_USER | {"content": [image]}]},
        "template": {"chat_template": "{{ 1 }}"},
        "variable of the template": {"chat_template_kwargs": {"messages": "{{ 1 }}"}},
        "template in its variables": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "tools that hold nothing": {"tools": [{"type": "function"}]},
        "tools beyond the limit": {"tools": [tool] * 5000},
        "tools nested deeply": {"tools": [tool | {"function": {"name": "f", "parameters": _nested(60)}}]},
        "n a million in a chat": {"n": 10**6},
        "json_schema without a schema": {"response_format": {"type": "json_schema"}},
        "invalid schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}
        },
    }


def _elsewhere() -> dict[str, tuple[str, dict[str, Any]]]:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}
    return {
        "image URL in a response": ("/v1/responses", {"input": [image]}),
        "stored response": ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        "tool of another kind": ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}),
        "embeddings of nothing": ("/v1/embeddings", {"input": []}),
        "embeddings beyond the context": ("/v1/embeddings", {"input": [5] * 100_000}),
        "a million tokens to text": ("/detokenize", {"tokens": [5] * 1_000_000}),
        "text beyond the context to tokens": ("/tokenize", {"prompt": "the quick " * 500_000}),
        "no route": ("/v1/nothing", {}),
    }


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema
