"""The server's view of its engine: what it shows, to whom, and the cost of showing it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.server.telemetry import engine_view

KEY = {"Authorization": "Bearer first-key"}
LONG = {"prompt": "the quick brown fox", "max_tokens": 80, "ignore_eos": True}


@pytest.fixture
def base(engine: Engine) -> Iterator[str]:
    """Where a server with a key is; one for each test, which may watch as often as is allowed."""
    with ServerHandle(engine, config=ServerConfig(api_keys=("first-key",))) as server:
        yield server.url.removesuffix("/v1")
    engine.check()


def pictures(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_the_shell_needs_no_key_and_the_engine_does(base: str) -> None:
    page = httpx.get(f"{base}/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy
    for name, kind in (("main.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        file = httpx.get(f"{base}/static/{name}")
        assert file.status_code == 200 and file.headers["content-type"].startswith(kind)
        assert file.headers["content-security-policy"] == policy
    for path in ("/v1/engine", "/v1/engine/events", "/v1/models"):
        assert httpx.get(f"{base}{path}").status_code == 401
    assert httpx.post(f"{base}/").status_code == 405


@pytest.mark.parametrize("path", ["/static/", "/static/nothing.js", "/static/%2e%2e/app.py", "/static/..%2fapp.py"])
def test_only_the_files_of_the_page_are_open(base: str, path: str) -> None:
    assert httpx.get(base + path, headers=KEY).status_code == 404


def test_the_page_takes_nothing_from_elsewhere(base: str) -> None:
    page = httpx.get(f"{base}/").text
    assert "http://" not in page and "https://" not in page and "style=" not in page and "onclick" not in page
    assert page.count("<script") == 1 and '<script type="module" src="/static/main.js"></script>' in page


def test_a_running_request_is_seen_and_then_gone(base: str, engine: Engine, slow: None) -> None:
    with ThreadPoolExecutor(1) as pool, httpx.stream("GET", f"{base}/v1/engine/events", headers=KEY) as stream:
        seen = pictures(stream)
        first = next(seen)
        running = pool.submit(httpx.post, f"{base}/v1/completions", json=LONG, headers=KEY, timeout=60)
        busy = next(picture for picture in seen if picture["num_running"])
        (request,) = busy["requests"]
        assert request["state"] in ("prefill", "decode") and request["prompt_tokens"] > 0 and request["age"] >= 0
        assert request.keys().isdisjoint({"prompt", "text", "tenant", "cache_salt"})
        assert any(what == engine_view.FIRST_REQUEST for what, _ in busy["kv"]["cells"])
        assert busy["kv"]["total"] == engine.memory.num_blocks
        cells = sum(count for _, count in busy["kv"]["cells"])
        assert cells == -(-busy["kv"]["total"] // busy["kv"]["blocks_per_cell"]) <= engine_view.MAX_CELLS
        later = next(picture for picture in seen if picture["output_tokens"] > busy["output_tokens"])
        assert later["steps"][0]["step"] > busy["steps"][-1]["step"], "only what is new"
        assert later["steps"][-1]["decode_tokens"] == 1
        assert running.result().status_code == 200
        idle = next(picture for picture in seen if not picture["num_running"])
        assert idle["requests"] == [] and idle["kv"]["used"] == 0
        assert idle["output_tokens"] - first["output_tokens"] == 80
    assert httpx.get(f"{base}/v1/engine", headers=KEY).json()["num_running"] == 0


def test_one_picture_serves_all_and_none_is_taken_for_nobody(
    base: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, snapshot = 0, engine.snapshot

    def count() -> Any:
        nonlocal taken
        taken += 1
        return snapshot()

    monkeypatch.setattr(engine, "snapshot", count)
    monkeypatch.setattr(engine_view, "INTERVAL", 60.0)
    with ThreadPoolExecutor(8) as pool, httpx.Client(headers=KEY) as client:
        answers = list(pool.map(lambda _: client.get(f"{base}/v1/engine").json(), range(24)))
    assert taken == 1 and all(answer == answers[0] for answer in answers)
    httpx.post(f"{base}/v1/completions", json=LONG | {"max_tokens": 20}, headers=KEY, timeout=60)
    assert taken == 1


def test_watchers_are_bounded_and_their_places_come_back(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_view, "MAX_WATCHERS", 2)
    url = f"{base}/v1/engine/events"
    with ExitStack() as stack:
        watching = [pictures(stack.enter_context(httpx.stream("GET", url, headers=KEY))) for _ in range(2)]
        for seen in watching:  # kept: when it goes, the connection is closed
            next(seen)
        refused = httpx.get(url, headers=KEY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_watchers"
        assert "retry-after" in refused.headers
    end = time.monotonic() + 30
    while time.monotonic() < end:  # the server has to notice first
        with httpx.stream("GET", url, headers=KEY) as stream:
            if stream.status_code == 200:
                assert next(pictures(stream))["object"] == "engine.snapshot"
                return
    pytest.fail("the places of those who left did not come back")


def test_who_watches_holds_no_shutdown_up(engine: Engine) -> None:
    with ServerHandle(engine) as server, httpx.stream("GET", f"{server.url}/engine/events", timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.drain(600)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        server._thread.join(30)
        assert not server._thread.is_alive()
