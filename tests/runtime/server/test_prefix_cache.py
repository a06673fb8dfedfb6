"""Cached prefixes belong to a key: another key's prompts show neither in tokens nor in time saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle

PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def own(tiny_model: Path) -> Iterator[ServerHandle]:
    """A cache that no other test has filled."""
    engine = Engine(str(tiny_model), EngineConfig(max_model_len=256, kv_cache_memory=8 << 20, threads=1))
    with ServerHandle(engine, config=ServerConfig(api_keys=("first", "second"))) as server:
        yield server
    engine.check()


def cached(server: ServerHandle, key: str, path: str = "completions") -> int:
    body = {"messages": [{"role": "user", "content": "the quick brown fox " * 8}]} if "chat" in path else {}
    body = body or {"prompt": PROMPT}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{server.url}/{path}", json=body | {"max_tokens": 2}, headers=headers, timeout=60)
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_key_finds_its_own_prefixes_and_no_other_ones(own: ServerHandle, path: str) -> None:
    assert cached(own, "first", path) == 0
    assert (hit := cached(own, "first", path)) >= 16
    assert cached(own, "second", path) == 0
    assert cached(own, "second", path) == cached(own, "first", path) == hit
