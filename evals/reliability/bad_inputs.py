"""Requests that must be refused: bodies, numbers, prompts and messages that no client means."""

from __future__ import annotations

import json
from typing import Any

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


def bad_inputs() -> list[tuple[str, str, bytes]]:
    """(name, path, body) of each."""
    raw: dict[str, bytes] = {
        "not an object": b"[]",
        "not JSON": b"{",
        "33 MiB": b'{"prompt": "' + b"a" * (33 << 20) + b'"}',
        "200,000 levels": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "NaN": b'{"prompt": "a", "temperature": NaN}',
        "Infinity": b'{"prompt": "a", "temperature": Infinity}',
        "duplicate keys": b'{"prompt": "a", "prompt": "b"}',
        "lone surrogate": b'{"prompt": "\\ud800"}',
        "NUL": b'{"prompt": "\\u0000"}',
        "not UTF-8": b'{"prompt": "\xff"}',
    }
    fields: dict[str, Any] = {
        "1,025 prompts": {"prompt": ["a"] * 1025},
        "empty prompt": {"prompt": ""},
        "negative token": {"prompt": [-1]},
        "token beyond the vocabulary": {"prompt": [10**6]},
        "more tokens than the context": {"prompt": [5] * 100_000},
        "more text than the context": {"prompt": "the quick " * 50_000},
        "n 0": {"n": 0},
        "n -1": {"n": -1},
        "n a million": {"n": 10**6},
        "max_tokens 0": {"max_tokens": 0},
        "max_tokens 2**31": {"max_tokens": 2**31},
        "min_tokens above max_tokens": {"min_tokens": 5, "max_tokens": 4},
        "temperature -1": {"temperature": -1},
        "top_p 0": {"top_p": 0},
        "seed beyond int64": {"seed": 2**63},
        "logprobs -2": {"logprobs": -2},
        "logprobs a": {"logprobs": "a"},
        "logprobs a million": {"logprobs": 10**6},
        "logit_bias on no token": {"logit_bias": {"99999999": 1}},
        "five stops": {"stop": list("abcde")},
        "empty stop": {"stop": ""},
        "priority": {"priority": 10**6},
        "unknown field": {"max_token": 4},
        "another model": {"model": "gpt-7"},
    }
    message: dict[str, Any] = {"role": "user", "content": "a"}
    chats: dict[str, Any] = {
        "messages null": {"messages": None},
        "messages text": {"messages": "a"},
        "messages numbers": {"messages": [123]},
        "messages empty object": {"messages": [{}]},
        "role 123": {"messages": [message | {"role": 123}]},
        "content 123": {"messages": [message | {"content": 123}]},
        "image URL": {
            "messages": [message | {"content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]
        },
        "template": {"messages": [message], "chat_template": "{{ 1 }}"},
        "json_schema without a schema": {"messages": [message], "response_format": {"type": "json_schema"}},
        "invalid schema": {
            "messages": [message],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}},
        },
    }
    return [
        *((name, _COMPLETIONS, body) for name, body in raw.items()),
        *((name, _COMPLETIONS, json.dumps({"prompt": "a"} | body).encode()) for name, body in fields.items()),
        *((name, _CHAT, json.dumps(body).encode()) for name, body in chats.items()),
    ]
