"""Adapters over HTTP: their names are models, and they come and go while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import UsageError
from qserve.kernels import native
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.limits.keys import add_key
from qserve.runtime.server.routes.adapters import _allowed
from qserve.runtime.server.serve import ServerHandle
from tests.adapters import write_adapter

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
SHAPES = {f"model.layers.{i}.mlp.{name}_proj": (128, 64) for i in range(2) for name in ("gate", "up")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "law", "outside/x")):
        write_adapter(folder / name if "/" in name else folder / "allowed" / name, SHAPES, seed=seed, size=0.3)
    (folder / "allowed" / "link").symlink_to(folder / "outside" / "x")
    return folder


@pytest.fixture(scope="module")
def engine(tiny_model: Path, folder: Path) -> Engine:
    return Engine(str(tiny_model), EngineConfig(
        max_num_seqs=8, kv_cache_memory=8 << 20, threads=2, max_loras=3,
        lora_modules=(("base-sql", str(folder / "allowed" / "sql")),),
    ))  # fmt: skip


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    return {name: add_key(name, folder / "keys.toml", admin=name == "admin") for name in ("admin", "user")}


@pytest.fixture(scope="module")
def server(engine: Engine, folder: Path, keys: dict[str, str]) -> Iterator[ServerHandle]:
    config = ServerConfig(model_name="tiny", lora_dir=folder / "allowed", api_keys_file=folder / "keys.toml")
    with ServerHandle(engine, config=config) as handle:
        yield handle
    engine.check()


@pytest.fixture
def client(server: ServerHandle, keys: dict[str, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"x-api-key": keys["admin"]}, timeout=60) as client:
        yield client


def change(client: httpx.Client, what: str, **body: Any) -> httpx.Response:
    return client.post(f"/{what}_lora_adapter", json=body)


def ask(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hello world", "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more


def text(client: httpx.Client, model: str) -> str:
    answer = client.post("/completions", json=ask(model)).raise_for_status().json()
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def test_a_name_is_a_model(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/models").json()["data"]] == ["tiny", "base-sql"]
    card = client.get("/models/base-sql").json()
    assert card["parent"] == "tiny" and len(card["qserve"]["lora_sha256"]) == 64
    assert text(client, "base-sql") != text(client, "tiny")
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "base-sql", "messages": messages, "max_tokens": 2}
    assert client.post("/chat/completions", json=body).json()["model"] == "base-sql"
    assert client.post("/messages", json=body).json()["model"] == "base-sql"
    answered = client.post("/responses", json={"model": "base-sql", "input": "hi", "max_output_tokens": 2}).json()
    assert answered["model"] == "base-sql"
    assert client.post("/embeddings", json={"model": "base-sql", "input": "hi"}).status_code == 400
    unknown = client.post("/completions", json=ask("nobody"))
    assert unknown.status_code == 404 and "it is 'tiny' or 'base-sql'" in unknown.json()["error"]["message"]


def test_load_replace_and_unload(client: httpx.Client) -> None:
    assert change(client, "load", lora_name="mine", lora_path="sql").raise_for_status().json()["id"] == "mine"
    assert text(client, "mine") == text(client, "base-sql")
    again = change(client, "load", lora_name="mine", lora_path="law")
    assert again.status_code == 400 and "is loaded already" in again.json()["error"]["message"]
    change(client, "load", lora_name="mine", lora_path="law", load_inplace=True).raise_for_status()
    assert text(client, "mine") != text(client, "base-sql")
    assert "mine" in client.get("/../openapi.json").text
    assert change(client, "unload", lora_name="mine").raise_for_status().json()["deleted"]
    assert client.post("/completions", json=ask("mine")).status_code == 404
    assert change(client, "unload", lora_name="mine").status_code == 404
    assert "mine" not in client.get("/../openapi.json").text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "x", "lora_path": "../outside/x"}, 403, "outside the directory"),
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "outside the directory"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "outside the directory"),
        ({"lora_name": "x", "lora_path": "x" * 4000}, 400, "is no directory"),
        ({"lora_name": "x", "lora_path": "nothing"}, 400, "is no directory"),
        ({"lora_name": "tiny", "lora_path": "sql"}, 400, "name of the model itself"),
        ({"lora_name": "", "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "sql"}, 400, "must be printable"),
        ({"lora_name": "x"}, 400, "lora_path"),
    ],
)
def test_what_is_refused(client: httpx.Client, body: dict[str, Any], status: int, words: str) -> None:
    answer = change(client, "load", **body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_only_an_admin_changes_adapters(server: ServerHandle, keys: dict[str, str]) -> None:
    with httpx.Client(base_url=server.url, headers={"x-api-key": keys["user"]}) as client:
        assert change(client, "load", lora_name="x", lora_path="sql").status_code == 403
        assert change(client, "unload", lora_name="base-sql").status_code == 403
        assert text(client, "base-sql")


def test_without_a_directory_nothing_is_loaded(engine: Engine, folder: Path) -> None:
    with pytest.raises(APIError, match="start it with --lora-dir DIR"):
        _allowed(None, "sql")
    with pytest.raises(UsageError, match=r"--lora-dir .* is no directory"):
        ServerConfig(lora_dir=folder / "nothing")


def test_swaps_under_load_lose_nothing(
    server: ServerHandle, engine: Engine, keys: dict[str, str], client: httpx.Client
) -> None:
    """Every request is answered whole, with the text of one adapter or the other; an unload waits for its requests."""
    change(client, "load", lora_name="swap", lora_path="sql").raise_for_status()
    sql = text(client, "swap")
    change(client, "load", lora_name="swap", lora_path="law", load_inplace=True).raise_for_status()
    law, ended = text(client, "swap"), 0

    async def run() -> None:
        nonlocal ended
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(
            base_url=server.url, headers={"x-api-key": keys["admin"]}, timeout=60, limits=limits
        ) as http:

            async def one(number: int) -> None:
                nonlocal ended
                await asyncio.sleep(0.01 * number)
                grammar = {"structured_outputs": {"regex": "[a-z]{3}"}} if number % 5 == 4 else {}
                answer = (await http.post("/completions", json=ask("swap", **grammar))).raise_for_status().json()
                assert grammar or answer["choices"][0]["text"] in (sql, law)
                ended += 1

            async def swap() -> None:
                for number in range(10):
                    body = {"lora_name": "swap", "lora_path": ("sql", "law")[number % 2], "load_inplace": True}
                    (await http.post("/load_lora_adapter", json=body)).raise_for_status()

            await asyncio.gather(swap(), *map(one, range(40)))
            last = [asyncio.create_task(http.post("/completions", json=ask("swap", max_tokens=300))) for _ in range(6)]
            while engine.adapters.find("swap").users < len(last):
                await asyncio.sleep(0.01)
            (await http.post("/unload_lora_adapter", json={"lora_name": "swap"})).raise_for_status()
            assert all(each.name != "swap" for each in engine.adapters._slots.values())
            for answer in await asyncio.gather(*last):
                assert answer.raise_for_status().json()["usage"]["completion_tokens"] == 300

    asyncio.run(run())
    assert ended == 40
