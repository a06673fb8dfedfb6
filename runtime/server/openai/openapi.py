"""The OpenAPI document: what every route takes and answers, from the pydantic models that validate requests.

A route says what its body is with ``described``; ``document`` puts the rest around it. The bounds of sampling
fields are those of ``SamplingParams``. OpenAPI 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.routing import BaseRoute

from qserve.runtime.request import MAX_PRIORITY
from qserve.runtime.sampling import (
    INT31,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
)
from qserve.runtime.server.errors import ANTHROPIC_PATH
from qserve.runtime.server.http.authentication import OPEN_PATHS
from qserve.runtime.server.openai.protocol import MAX_PROMPTS

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
# Keys under which a route describes itself, until the document is made.
_MODELS, _STREAMS = "x-qserve-models", "x-qserve-streams"
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR: Json = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_STATUSES = {
    400: "The request is not valid; `param` names the field at fault.",
    401: "No valid API key was given.",
    403: "The key may not ask for this `priority`, or a page of another site asks a server without keys.",
    404: "There is no such model or route.",
    405: "The route has no such method.",
    408: "The body did not arrive in time, or the answer within the `timeout` that was asked for.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    429: "This key has too many requests, or has spent its tokens; `Retry-After` says when to come back.",
    431: "The headers are too large.",
    500: "The server failed on this request.",
    503: "The server is full, or ends; `Retry-After` says when to come back.",
}
_EVERYWHERE = (401, 403, 405, 431, 500, 503)
_WITH_BODY = (400, 404, 408, 413, 415, 429)

# Bounds that the models leave to SamplingParams, by field.
BOUNDS: dict[str, Json] = {
    **{name: number.bounds.schema() for name, number in NUMBERS.items()},
    "max_completion_tokens": NUMBERS["max_tokens"].bounds.schema(),
    "top_logprobs": NUMBERS["logprobs"].bounds.schema(),
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
}

_TEXT: Json = {"type": "string", "minLength": 1}
_TOKENS: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT: list[Json] = [
    _TEXT,
    _TOKENS,
    *({"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": item} for item in (_TEXT, _TOKENS)),
]


def _string(longest: int) -> Json:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def _list(items: Json, least: int, most: int) -> Json:
    return {"type": "array", "minItems": least, "maxItems": most, "items": items}


_STOP = _string(MAX_STOP_LENGTH)
_TOKEN: Json = {"type": "integer", "minimum": 0, "maximum": INT31}
# Shapes of the fields that are checked by a validator of the model, whose schema pydantic cannot derive.
_SHAPES: dict[str, list[Json]] = {
    "prompt": PROMPT,
    "stop": [_STOP, _list(_STOP, 0, MAX_STOP_STRINGS), {"type": "null"}],
    "stop_token_ids": [_list(_TOKEN, 0, MAX_STOP_TOKEN_IDS), {"type": "null"}],
    "allowed_token_ids": [_list(_TOKEN, 1, MAX_ALLOWED_TOKEN_IDS), {"type": "null"}],
    "bad_words": [_list(_string(MAX_BAD_WORD_LENGTH), 0, MAX_BAD_WORDS), {"type": "null"}],
    "content": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "additionalProperties": False,
            },
        },
    ],
}


@cache  # a process may have several servers
def described(body: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """Arguments for a route's decorator: they describe its JSON body and whether it may answer with events."""
    schema = body.model_json_schema(ref_template=_SCHEMAS + "{model}")
    models = schema.pop("$defs", {}) | {body.__name__: schema}
    for model in models.values():
        _refine(model)
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + body.__name__}}}
    return {
        "openapi_extra": {
            "requestBody": {"required": True, "content": content},
            _MODELS: models,
            _STREAMS: streams,
        }
    }


def document(routes: list[BaseRoute], model_names: Sequence[str]) -> Json:
    """The document of an application's routes, where requests call the model by one of ``model_names``."""
    content: Json = get_openapi(
        title="qserve",
        version=version("qserve-llm"),
        description="The API of OpenAI and, at `/v1/messages`, of Anthropic. Every answer has an `X-Request-Id`.",
        routes=routes,
    )
    schemas = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for path, methods in content["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if path == "/v1/models/{name}":
                    parameter["schema"] = {"enum": [*model_names]}
            schemas |= operation.pop(_MODELS, {})
            _complete(path, operation)
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [*model_names, None]}
    content["components"] = {
        "schemas": schemas,
        "responses": {
            f"{prefix}{status}": {
                "description": text,
                "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{error}"}}},
            }
            for status, text in _STATUSES.items()
            for prefix, error in (("", "Error"), ("anthropic-", "AnthropicError"))
        },
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    content["security"] = [{"key": []}, {"x-api-key": []}]
    return content


def _complete(path: str, operation: Json) -> None:
    """Add what FastAPI cannot know of an operation: its answers, and whether it needs a key."""
    kind = "text/plain" if path == "/metrics" else "application/json"
    answers: Json = {kind: {"schema": {"type": "string" if kind == "text/plain" else "object"}}}
    if operation.pop(_STREAMS, False):
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        answers["text/event-stream"] = {"schema": event}
    statuses = [*_EVERYWHERE, *(_WITH_BODY if "requestBody" in operation else (404,) if "{" in path else ())]
    prefix = "anthropic-" if path.startswith(ANTHROPIC_PATH) else ""
    operation["responses"] = {"200": {"description": "The answer.", "content": answers}} | {
        str(status): {"$ref": f"#/components/responses/{prefix}{status}"} for status in sorted(statuses)
    }
    if path in OPEN_PATHS:
        operation["security"] = []
        operation["responses"]["503"] = operation["responses"]["200"] | {
            "description": "The server is not ready, or its engine has failed."
        }


def _refine(definition: Json) -> None:
    """Add to a model's schema what its validators and ``SamplingParams`` ask of its fields."""
    for name, schema in definition.get("properties", {}).items():
        branches = schema.get("anyOf", [schema])
        if name in _SHAPES and not schema.keys() & {"type", "anyOf", "$ref"}:
            schema["anyOf"] = _SHAPES[name]
        for branch in branches:
            if name in BOUNDS and branch.get("type") in ("integer", "number"):
                branch.update(BOUNDS[name])
