"""The OpenAPI document: every route is in it, and its schemas say what the validators do."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.openai.openapi import BOUNDS
from qserve.runtime.server.serve import ServerHandle

HEADERS = {"Authorization": "Bearer first-key"}


@pytest.fixture(scope="module")
def document(server: ServerHandle) -> dict[str, Any]:
    url = server.url.replace("/v1", "/openapi.json")
    assert httpx.get(url).status_code == 401
    response = httpx.get(url, headers=HEADERS)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def test_every_operation_is_documented(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}"} <= document["paths"].keys()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "post":
                assert "requestBody" in operation, f"{path}: say what its body is with openapi.described"
            assert {"200", "401", "500"} <= operation["responses"].keys()
            assert "422" not in operation["responses"]
            assert ("security" in operation) == (path in ("/health", "/ready"))
    assert "x-qserve" not in str(document)


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in references(document):
        part: Any = document
        for step in reference.removeprefix("#/").split("/"):
            part = part[step]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


CASES = [
    ({"prompt": "a"}, True),
    ({"prompt": [5, 6]}, True),
    ({"prompt": ["a", "b"], "stop": ["x"], "max_tokens": 2, "logit_bias": None}, True),
    ({"prompt": [[5], [6]], "stop": "x", "best_of": 1, "max_tokens": 2}, True),
    ({}, False),
    ({"prompt": ""}, False),
    ({"prompt": ["a", 1]}, False),
    ({"prompt": [-1]}, False),
    ({"prompt": "a", "stop": ["a"] * 5}, False),
    ({"prompt": "a", "n": 0}, False),
    ({"prompt": "a", "temperature": -1}, False),
    ({"prompt": "a", "top_p": 0}, False),
    ({"prompt": "a", "unknown": 1}, False),
    ({"prompt": "a", "stream_options": {"include_usage": 1}}, False),
]


@pytest.mark.parametrize(("body", "valid"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_the_schema_and_the_server_agree(
    document: dict[str, Any], server: ServerHandle, body: dict[str, Any], valid: bool
) -> None:
    schema = {"$ref": "#/components/schemas/CompletionRequest", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == valid
    response = httpx.post(f"{server.url}/completions", json=body, headers=HEADERS)
    assert response.status_code == (200 if valid else 400)
    if not valid:
        error = {"$ref": "#/components/schemas/Error", "components": document["components"]}
        jsonschema.validate(response.json(), error, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "name", sorted(BOUNDS.keys() - {"max_completion_tokens", "top_logprobs", "priority", "min_tokens"})
)
def test_the_bounds_are_those_of_the_sampling_parameters(name: str) -> None:
    bounds = BOUNDS[name]
    inside = [bounds.get("minimum", 1e-9), bounds["maximum"]]
    outside = [bounds.get("minimum", 1) - 1, bounds["maximum"] + 1]
    more = {"use_beam_search": True} if name == "length_penalty" else {}
    for value in inside:
        SamplingParams(**more, **{name: value})
    for value in outside:
        with pytest.raises(RequestError) as error:
            SamplingParams(**more, **{name: value})
        assert error.value.param == name
