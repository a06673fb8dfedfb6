"""Tool calls that the model is held to: a random model calls what it must, with arguments that fit the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle
from tests.tiny_model import save_tiny_model

from ..scripted import HERMES, LLAMA, MARKERS, MISTRAL, MISTRAL_NAMED

SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Ulm", "Bonn"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "deep": {"$ref": "#/$defs/Deep"},
        },
        "required": ["city", "days", "deep"],
        "additionalProperties": False,
        "$defs": {
            "Deep": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
    },
    'say "hi"': {
        "type": "object",
        "properties": {"x": {"enum": ["a}", 'b"']}},
        "required": ["x"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module", params=[MARKERS, ()], ids=["special", "text"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "calling", request.param, context=1536)
    return Engine(str(path), EngineConfig(max_model_len=1536, kv_cache_memory=64 << 20, threads=2))


GLM, DEEPSEEK = (HERMES.replace("<tool_call>", sign) for sign in ("<arg_key>", "<｜tool▁call▁begin｜>"))
TEMPLATES = {
    "hermes": HERMES, "llama": LLAMA, "list": MISTRAL, "named": MISTRAL_NAMED, "glm": GLM, "deepseek": DEEPSEEK
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_calls_follow_their_schema(engine: Engine, template: str) -> None:
    engine.tokenizer.chat_template = template
    with (
        ServerHandle(engine, config=ServerConfig()) as server,
        openai.OpenAI(base_url=server.url, api_key="x", max_retries=0, timeout=120) as client,
    ):
        for choice in ("required", NAMED):
            answer = client.chat.completions.create(
                model="calling",
                messages=[{"role": "user", "content": "hi"}],
                tools=TOOLS,
                tool_choice=choice,  # type: ignore[arg-type]
                parallel_tool_calls=False,
                max_tokens=200,
                n=3,
                seed=1,
            )
            for each in answer.choices:
                assert each.finish_reason == "tool_calls" and each.message.content is None
                (call,) = each.message.tool_calls or ()
                assert call.type == "function"
                assert choice == "required" or call.function.name == "f"
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
