"""What replicas tell of their caches: the router knows of blocks that others asked for, and of those that are gone."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.fleet.prompts import prompt_of
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.limits.keys import add_key
from qserve.runtime.server.serve import ServerHandle
from tests.runtime.fleet.conftest import RouterHandle, root, routed

WORDS = "The quick brown fox jumps over the lazy dog. "


def ask(url: str, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    request = urllib.request.Request(url + path, json.dumps(body | {"max_tokens": 1}).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def known(router: RouterHandle, url: str, body: dict[str, Any], tenant: str = "") -> int:
    """Leading blocks of a prompt that the replica told of."""
    told = router.fleet.router._replicas[url].told or set()
    digests = prompt_of(body, tenant).digests
    return next((count for count, digest in enumerate(digests) if digest not in told), len(digests))


@contextmanager
def one(server: ServerHandle, **more: Any) -> Iterator[tuple[RouterHandle, str]]:
    url = root(server)
    with routed([url], **more) as router:
        until(lambda: router.fleet.router._replicas[url].told is not None, "it never told anything")
        yield router, url


PROMPTS = [{"prompt": WORDS * 6}, {"messages": [{"role": "user", "content": WORDS * 6}]}, {"prompt": [7] * 70}]


@pytest.mark.parametrize("body", PROMPTS, ids=["text", "chat", "tokens"])
def test_the_router_learns_what_was_computed_for_others(engines: list[Engine], body: dict[str, Any]) -> None:
    with ServerHandle(engines[0]) as server, one(server) as (router, url):
        ask(url, body)  # past the router
        blocks = len(prompt_of(body, "").digests)
        until(lambda: known(router, url, body) >= blocks - 1, "it does not know the prompt")
        assert blocks >= 4
        found = router.fleet.router.place(prompt_of(body, ""))
        assert found is not None and found.cached >= blocks - 1
        found.ended()


def test_what_is_evicted_is_known_to_be_gone(tiny_model: Path) -> None:
    config = EngineConfig(max_model_len=128, max_num_seqs=2, kv_cache_memory=64 << 10, threads=1)
    engine = Engine(str(tiny_model), config)
    total = engine.scheduler.blocks.num_blocks
    body = {"prompt": [7] * 64}
    with ServerHandle(engine) as server, one(server) as (router, url):
        ask(router.url, body)
        until(lambda: known(router, url, body) == 4, "it does not know the prompt")
        for number in range(total // 4 + 2):
            ask(router.url, {"prompt": [100 + number] * 64})
        until(lambda: known(router, url, body) == 0, "it believes in what is gone")
        told = router.fleet.router._replicas[url].told or set()
        blocks = engine.scheduler.blocks
        until(lambda: len(told) == blocks.num_cached, "the sums differ")


def test_with_keys_each_caller_has_blocks_of_its_own(engines: list[Engine], tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.toml", tmp_path / "outer.toml"
    key, ann = add_key("router", inner, router=True), add_key("ann", outer)
    body = PROMPTS[0]
    config = ServerConfig(api_keys_file=inner)
    with ServerHandle(engines[0], config=config) as server:
        with one(server, config=ServerConfig(api_keys_file=outer), key=key) as (router, url):
            ask(router.url, body, ann)
            until(lambda: known(router, url, body, "ann") > 2, "it does not know the prompt")
            assert known(router, url, body) == 0
        with one(server, key=key) as (router, url):  # without keys of its callers
            ask(router.url, body)
            until(lambda: known(router, url, body) > 2, "it does not know the prompt")
        plain = add_key("bob", inner)
        server.service.keys.reload()
        request = urllib.request.Request(url + "/v1/prefixes/events", headers={"Authorization": f"Bearer {plain}"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)


def test_a_router_that_comes_later_is_told_all_and_one_that_goes_costs_nothing(engines: list[Engine]) -> None:
    body = PROMPTS[0]
    with ServerHandle(engines[1]) as server:
        with one(server) as (first, url):
            ask(first.url, body)
            until(lambda: known(first, url, body) > 2, "it does not know the prompt")
            with one(server) as (second, _):
                until(lambda: known(second, url, body) == known(first, url, body), "the second knows less")
        until(lambda: not server.service.prefixes.is_watched, "nobody listens")
        until(lambda: engines[1].scheduler.blocks._touched is None, "the engine still tells")
