"""Every parameter of the official SDK works or is refused by its name: a new one in the SDK fails here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from qserve.runtime.server.serve import ServerHandle

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}


@dataclass(frozen=True)
class Route:
    """``works`` and ``refused``: parameters with a value that asks for something."""

    path: str
    sdk: Any  # the TypedDict of what the SDK's create() takes, with which stream is not listed
    least: Mapping[str, Any]
    works: Mapping[str, Any]
    refused: Mapping[str, Any]

    @property
    def keys(self) -> frozenset[str]:
        keys: frozenset[str] = self.sdk.__required_keys__ | self.sdk.__optional_keys__
        return keys

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self.works) | frozenset(self.refused)


SAMPLING = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.5},
    "max_tokens": 3,
    "n": 2,
    "presence_penalty": -0.5,
    "seed": 7,
    "stop": ["x"],
    "temperature": 0.7,
    "top_p": 0.9,
    "user": "somebody",
}
HINTS = {
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "prompt_cache_key": "mine",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
}
STORED = {"moderation": {"model": "omni-moderation-latest"}, "store": True}
ROUTES = [
    Route(
        "/completions",
        completion_create_params.CompletionCreateParamsBase,
        {"prompt": "a", "max_tokens": 2},
        SAMPLING | {"best_of": 2, "echo": True, "logprobs": 2, "prompt": ["a", "b"]},
        {"suffix": "b"},
    ),
    Route(
        "/chat/completions",
        chat_create_params.CompletionCreateParamsBase,
        {"messages": [USER], "max_tokens": 2},
        SAMPLING
        | HINTS
        | {
            "logprobs": True,
            "max_completion_tokens": 2,
            "messages": [{"role": "developer", "content": "be kind"}, USER],
            "reasoning_effort": "low",
            "response_format": {"type": "json_object"},
            "safety_identifier": "somebody",
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 2,
            "verbosity": "low",
        },
        STORED
        | {
            "audio": {"format": "wav", "voice": "alloy"},
            "function_call": "auto",
            "functions": [FUNCTION],
            "modalities": ["text", "audio"],
            "prediction": {"type": "content", "content": "a"},
            "web_search_options": {},
        },
    ),
    Route(
        "/responses",
        response_create_params.ResponseCreateParamsBase,
        {"input": "a", "max_output_tokens": 2},
        HINTS
        | {
            "input": [USER],
            "instructions": "be kind",
            "max_output_tokens": 3,
            "reasoning": {"effort": "low", "summary": "auto"},
            "safety_identifier": "somebody",
            "temperature": 0.7,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 0.9,
            "user": "somebody",
        },
        STORED
        | {
            "access_programs": ["a"],
            "background": True,
            "context_management": [{"type": "compaction"}],
            "conversation": "conv_1",
            "image": {"model": "gpt-image-2"},
            "include": ["message.output_text.logprobs"],
            "max_tool_calls": 3,
            "previous_response_id": "resp_1",
            "prompt": {"id": "pmpt_1"},
            "top_logprobs": 2,
            "truncation": "auto",
        },
    ),
    Route(
        "/embeddings",
        embedding_create_params.EmbeddingCreateParams,
        {"input": "a"},
        {"dimensions": 8, "encoding_format": "base64", "input": [[1, 2], [3]], "user": "somebody"},
        {},
    ),
]
ELSEWHERE = {"model", "stream_options"}  # need another name, and stream
WORKS = [(route, name) for route in ROUTES for name in route.works]
REFUSED = [(route, name) for route in ROUTES for name in route.refused]
NEEDS = {"top_logprobs": {"logprobs": True}, "max_completion_tokens": {"max_tokens": None}}


def named(value: object) -> str:
    return value.path if isinstance(value, Route) else str(value)


@pytest.fixture(scope="module")
def http(server: ServerHandle) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer first-key"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def post(http: httpx.Client, route: Route, body: Mapping[str, Any]) -> httpx.Response:
    return http.post(route.path, json={**route.least, **body})


def refused(response: httpx.Response, name: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0].split("[")[0] == name and name in error["message"]


@pytest.mark.parametrize("route", ROUTES, ids=named)
def test_every_parameter_of_the_sdk_is_known_here_or_refused_by_its_name(http: httpx.Client, route: Route) -> None:
    assert not route.works.keys() & route.refused.keys()
    for name in route.keys - ELSEWHERE - route.known:  # those that a newer SDK has
        refused(post(http, route, {name: True}), name)


@pytest.mark.parametrize(("route", "name"), WORKS, ids=named)
def test_it_works_and_is_looked_at(http: httpx.Client, route: Route, name: str) -> None:
    response = post(http, route, NEEDS.get(name, {}) | {name: route.works[name]})
    assert response.status_code == 200, response.text
    refused(post(http, route, NEEDS.get(name, {}) | {name: {"no": ["such", "value"]}}), name)


@pytest.mark.parametrize(("route", "name"), REFUSED, ids=named)
def test_it_is_refused_by_its_name(http: httpx.Client, route: Route, name: str) -> None:
    refused(post(http, route, {name: route.refused[name]}), name)
    refused(post(http, route, {name: route.refused[name], "stream": True}), name)


def test_hints_change_no_answer(http: httpx.Client) -> None:
    """What the official SDK's agents send along; a response repeats its metadata."""
    chat, responses = ROUTES[1], ROUTES[2]
    hints = HINTS | {"reasoning_effort": "high", "verbosity": "high", "temperature": 0}
    plain, hinted = (post(http, chat, body).json() for body in ({"temperature": 0}, hints))
    assert plain["choices"] == hinted["choices"]
    more = {"reasoning": {"effort": "high"}, "text": {"verbosity": "high"}}
    assert post(http, responses, HINTS | more).json()["metadata"] == HINTS["metadata"]
    for summary in ("concise", "detailed"):
        refused(post(http, responses, {"reasoning": {"summary": summary}}), "reasoning")


@pytest.mark.parametrize("route", ROUTES, ids=named)
def test_null_asks_for_nothing(http: httpx.Client, route: Route) -> None:
    nothing = dict.fromkeys(route.known - route.least.keys())
    assert post(http, route, nothing).status_code == 200


@pytest.mark.parametrize("route", ROUTES[:3], ids=named)
def test_options_of_streams(http: httpx.Client, route: Route) -> None:
    sdk = response_create_params.StreamOptions if route.path == "/responses" else None
    keys = (sdk or chat_create_params.ChatCompletionStreamOptionsParam).__annotations__.keys()
    for name in keys - {"include_obfuscation", "include_usage"}:  # those that a newer SDK has
        refused(post(http, route, {"stream": True, "stream_options": {name: True}}), "stream_options")
    on = {"include_obfuscation": False} | ({} if sdk else {"include_usage": True})
    assert post(http, route, {"stream": True, "stream_options": on}).status_code == 200
    refused(post(http, route, {"stream": True, "stream_options": {"include_obfuscation": True}}), "stream_options")
    refused(post(http, route, {"stream": True, "stream_options": {"unheard_of": True}}), "stream_options")
