"""A small random model behind the real engine and the real server, on a free port of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from qserve.checkpoint.demo import demo_path
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle
from tests.tiny_model import save_tiny_model

from .scripted import MARKERS, Scripted, Start

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module", autouse=True)
def _plain_http(plain_http: None) -> None:
    """In every module of this folder."""


# Where a real tokenizer, vocabulary or answer may differ from the tiny model's.
WITH_THE_DEMO = (
    "chat.test_prompts", "http.test_streaming", "limits.test_constraints", "openai.test_continuous_usage",
    "routes.test_completions", "routes.test_embeddings", "routes.test_messages", "routes.test_must_work",
    "routes.test_scores",
)  # fmt: skip
DEMO = pytest.param("demo", marks=[pytest.mark.slow, pytest.mark.skipif(not demo_path().exists(), reason="no demo")])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames and metafunc.module.__name__.endswith(WITH_THE_DEMO):
        metafunc.parametrize("engine", ["tiny", DEMO], indirect=True, scope="session")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Engine:
    model = "demo" if getattr(request, "param", "tiny") == "demo" else tiny_model
    config = EngineConfig(max_model_len=512, max_num_seqs=16, kv_cache_memory=256 << 20, threads=2)
    return Engine(str(model), config)


class Slow:
    """A runner that takes its time, so that something can happen while it runs."""

    def __init__(self, runner: Any, seconds: float) -> None:
        self.runner = runner
        self.seconds = seconds

    def run(self, *arguments: Any) -> Any:
        time.sleep(self.seconds)
        return self.runner.run(*arguments)


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "runner", Slow(engine.runner, 0.02))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[ServerHandle]:
    with ServerHandle(engine, config=ServerConfig(api_keys=KEYS, vllm_metrics=True)) as handle:
        yield handle
    engine.check()


@pytest.fixture
def client(server: ServerHandle) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEYS[0], max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(server: ServerHandle) -> str:
    return server.service.model_name


@pytest.fixture(scope="session")
def scripted_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """It writes what its runner is told. The markers of tool calls are special tokens of its tokenizer."""
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "tools", MARKERS, context=2048)
    config = EngineConfig(max_model_len=2048, max_num_seqs=8, kv_cache_memory=64 << 20, threads=2)
    engine = Engine(str(path), config)
    engine.runner = Scripted(engine)
    return engine


@pytest.fixture
def script(scripted_engine: Engine) -> Scripted:
    assert isinstance(scripted_engine.runner, Scripted)
    return scripted_engine.runner


@pytest.fixture
def start(scripted_engine: Engine) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(template: str, **config: Any) -> openai.OpenAI:
            scripted_engine.tokenizer.chat_template = template
            server = stack.enter_context(ServerHandle(scripted_engine, config=ServerConfig(**config)))
            return stack.enter_context(openai.OpenAI(base_url=server.url, api_key="x", max_retries=0, timeout=60))

        yield start
    scripted_engine.check()
