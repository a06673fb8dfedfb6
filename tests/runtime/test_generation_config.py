"""``generation_config.json``: defaults of requests that do not say, and where an answer ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.source import open_model
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.generation_config import GenerationConfig
from qserve.runtime.llm import LLM
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.server.serve import ServerHandle

CONTENT = {
    "do_sample": True, "temperature": 0.0, "top_k": 20, "top_p": 0.8, "min_p": None, "repetition_penalty": 1.05,
    "max_new_tokens": 30, "eos_token_id": [7, 9], "transformers_version": "5.0.0",
}  # fmt: skip
DEFAULTS = {"temperature": 0.0, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 30}


def write(directory: Path, content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with defaults of its own."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(tiny_model, path)
    return write(path, CONTENT)


def test_where_the_defaults_come_from(model: Path, tiny_model: Path, tmp_path: Path) -> None:
    source = open_model(model)
    usual = {source.config["eos_token_id"]}
    auto, none = GenerationConfig.of(source), GenerationConfig.of(source, "vllm")
    assert (auto.defaults, auto.eos_token_ids) == (DEFAULTS, {7, 9} | usual)
    assert (none.defaults, none.eos_token_ids) == ({}, {7, 9} | usual)
    assert none.line() is None
    assert str(auto.line()).startswith("sampling defaults of generation_config.json: temperature 0, top_k 20, top_p")
    other = write(tmp_path / "other", {"top_k": 3, "eos_token_id": 5})
    for path in (other, other / "generation_config.json"):
        found = GenerationConfig.of(source, str(path))
        assert (found.defaults, found.eos_token_ids) == ({"top_k": 3}, {5} | usual)
    assert GenerationConfig.of(open_model(tiny_model)).defaults == {}
    with pytest.raises(UsageError, match="--generation-config must be auto, vllm or a file; there is no nowhere"):
        GenerationConfig.of(source, "nowhere")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 100"),
        ({"top_p": "high"}, "top_p must be a number"),
        ({"max_new_tokens": 0}, "max_tokens must be between 1"),
        ([], "generation_config.json"),
    ],
)
def test_a_value_that_is_not_valid(tiny_model: Path, tmp_path: Path, content: Any, words: str) -> None:
    source = open_model(tiny_model)
    with pytest.raises(CheckpointError, match=words):
        GenerationConfig.of(source, str(write(tmp_path / "bad", content)))


def test_a_call_that_gives_no_parameters_has_those_of_the_model(model: Path) -> None:
    llm = LLM(str(model), EngineConfig(kv_cache_memory=4 << 20))
    given = llm.get_default_sampling_params()
    assert given == SamplingParams(**DEFAULTS)
    assert llm.generate("hello")[0].outputs[0].token_ids == llm.generate("hello", given)[0].outputs[0].token_ids
    plain = LLM(str(model), kv_cache_memory=4 << 20, generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()


@pytest.fixture(scope="module")
def server(model: Path, plain_http: None) -> Iterator[ServerHandle]:
    engine = Engine(str(model), EngineConfig(max_model_len=256, kv_cache_memory=16 << 20, threads=2))
    with ServerHandle(engine) as handle:
        yield handle
    engine.check()


def post(server: ServerHandle, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_what_a_request_does_not_say_is_as_the_model_has_it(server: ServerHandle) -> None:
    models = httpx.get(f"{server.url}/models").json()
    assert models["data"][0]["qserve"]["sampling_defaults"] == DEFAULTS
    said = {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": 30, "top_k": 20, "top_p": 0.8}
    asked = {"prompt": "the quick", "ignore_eos": True}
    answer = post(server, "completions", **asked)
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["choices"] == post(server, "completions", **asked, **said)["choices"]
    hot = [post(server, "completions", **asked, temperature=5.0, top_k=0, top_p=1.0, seed=seed) for seed in range(3)]
    assert len({each["choices"][0]["text"] for each in [answer, *hot]}) == 4, "what a request says goes first"
    assert post(server, "completions", **asked, use_beam_search=True)["usage"]["completion_tokens"] == 30
    messages = [{"role": "user", "content": "hello"}]
    more: dict[str, Any] = {"messages": messages, "ignore_eos": True, "logit_bias": {"7": -100, "9": -100}}
    chat = post(server, "chat/completions", **more)
    assert chat["usage"]["completion_tokens"] == 30
    assert chat["choices"] == post(server, "chat/completions", **more, **said)["choices"]
    shown = post(server, "responses", input="hello", top_p=0.5)
    assert (shown["temperature"], shown["top_p"]) == (0.0, 0.5)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_long_prompt_shortens_a_default(server: ServerHandle, path: str) -> None:
    """What is asked for is refused where there is no room; a default of the model is not."""
    text = "the " * 230
    body: dict[str, Any] = {"prompt": text} if path == "completions" else {"input": text}
    if path == "chat/completions":
        body = {"messages": [{"role": "user", "content": text}]}
    usage = post(server, path, **body)["usage"]
    assert 226 < usage.get("prompt_tokens", usage.get("input_tokens")) < 256
    field = "max_output_tokens" if path == "responses" else "max_tokens"
    refused = httpx.post(f"{server.url}/{path}", json=body | {field: 30}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
