"""A checkpoint with NaN in a shard behind the real server: a request that meets it fails, and no other notices."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle

NAN_TOKEN = 7
# Few blocks: those that held NaN are used again at once.
CONFIG = EngineConfig(max_model_len=128, max_num_seqs=4, kv_cache_memory=256 << 10, threads=1)


def poisoned(model: Path, out: Path, tensor: str, row: int | slice) -> Path:
    """The model with NaN in a row of a tensor: a file that is whole, whatever is in it."""
    shutil.copytree(model, out)
    weights = load_file(out / "model.safetensors")
    weights[tensor][row] = float("nan")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def ask(server: ServerHandle, prompt: list[int], **body: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0.0} | body
    return httpx.post(f"{server.url}/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def damaged(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    """One token's embedding is NaN."""
    path = poisoned(tiny_model, tmp_path_factory.mktemp("nan") / "tiny", "model.embed_tokens.weight", NAN_TOKEN)
    engine = Engine(str(path), CONFIG)
    with ServerHandle(engine, config=ServerConfig()) as server:
        yield server
    engine.check()


def test_requests_that_meet_it_fail_and_no_other(damaged: ServerHandle) -> None:
    good = [5, 6] * 16
    expected = ask(damaged, good, logit_bias={NAN_TOKEN: -100}).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(ask, damaged, [NAN_TOKEN] * 32, seed=i, temperature=i % 2) for i in range(12)]
        beside = [pool.submit(ask, damaged, good, logit_bias={NAN_TOKEN: -100}) for _ in range(12)]
        for answer in (future.result() for future in bad):
            assert answer.status_code == 500 and "NaN" in answer.json()["error"]["message"]
        for answer in (future.result() for future in beside):
            assert answer.status_code == 200 and answer.json()["choices"] == expected
    assert ask(damaged, good, logit_bias={NAN_TOKEN: -100}).json()["choices"] == expected


def test_a_stream_that_meets_it_ends_with_an_error(damaged: ServerHandle) -> None:
    answer = ask(damaged, [NAN_TOKEN], stream=True)
    assert "NaN" in answer.text and not answer.text.endswith("data: [DONE]\n\n")


def test_a_model_that_is_nan_throughout_answers_nothing_and_stays_up(tiny_model: Path, tmp_path: Path) -> None:
    path = poisoned(tiny_model, tmp_path / "tiny", "lm_head.weight", slice(None))
    with ServerHandle(Engine(str(path), CONFIG), config=ServerConfig()) as server:
        for prompt in ([1], [2, 3], [4] * 40):
            answer = ask(server, prompt)
            assert answer.status_code == 500 and "NaN" in answer.json()["error"]["message"]
        assert httpx.get(server.url.replace("/v1", "/health")).json() == {"status": "ok"}
