"""The router in front of two real servers: what passes through, who may call, and where requests go."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from qserve.runtime.engine import Engine
from qserve.runtime.fleet.ingress import FORWARDED_ROUTES
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.kv_order import KV_PATH
from qserve.runtime.server.limits.keys import add_key
from qserve.runtime.server.serve import ServerHandle
from tests.runtime.server.waiting import idle, wait_until

from .conftest import RouterHandle, root, routed

FOX = "the quick brown fox and the lazy dog " * 8


@pytest.fixture
def router(servers: list[ServerHandle]) -> Iterator[RouterHandle]:
    with routed([root(server) for server in servers]) as handle:
        yield handle


@pytest.fixture
def client(router: RouterHandle) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def call(url: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    """The status, the headers and the JSON of an answer, or its text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text, status, found = answer.read().decode(), answer.status, answer.headers
    except urllib.error.HTTPError as error:
        text, status, found = error.read().decode(), error.code, error.headers
    is_json = "json" in found["content-type"]
    return status, {name.lower(): value for name, value in found.items()}, json.loads(text) if is_json else text


def test_every_answer_is_that_of_the_replica(
    client: openai.OpenAI, router: RouterHandle, servers: list[ServerHandle]
) -> None:
    name = client.models.list().data[0].id
    ask: dict[str, Any] = {"model": name, "max_tokens": 12, "temperature": 0}
    direct = openai.OpenAI(base_url=servers[0].url, api_key="none", max_retries=0)
    whole = client.completions.create(prompt=FOX, **ask)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(prompt=FOX, stream=True, **ask))
    assert whole.choices[0].text == text == direct.completions.create(prompt=FOX, **ask).choices[0].text
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=messages, **ask)
    assert chat.choices[0].message == direct.chat.completions.create(messages=messages, **ask).choices[0].message
    assert client.embeddings.create(model=name, input="hello").data[0].embedding
    assert client.responses.create(model=name, input="hello", max_output_tokens=4).usage
    status, _, message = call(
        f"{router.url}/v1/messages", {"model": name, "max_tokens": 4, "messages": messages, "temperature": 0}
    )
    assert status == 200 and message["type"] == "message"
    assert client.models.retrieve(name).id == name
    assert call(f"{router.url}/openapi.json")[2]["paths"]
    direct.close()


def test_requests_with_one_beginning_share_a_cache(router: RouterHandle) -> None:
    cached = [
        int(call(f"{router.url}/v1/completions", {"prompt": f"{i} {FOX}{tail}", "max_tokens": 1})[1]["x-cached-tokens"])
        for tail in "abc"
        for i in range(4)
    ]
    assert cached[:4] == [0] * 4 and min(cached[4:]) > 30
    _, _, text = call(f"{router.url}/metrics")
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    routed_to = [f'{{replica="{each}"}}' for each in router.fleet.replicas]
    assert sum(float(counts[f"qserve:router_requests_total{each}"]) for each in routed_to) == 12
    hits = sum(float(counts[f"qserve:replica_prefix_cache_hits_total{each}"]) for each in routed_to)
    assert hits >= sum(cached)  # the engines have served other tests
    assert all(f"qserve:replica_num_requests_waiting{each}" in counts for each in routed_to)


def test_errors_are_those_of_the_api(client: openai.OpenAI, router: RouterHandle) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    name = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=name, prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    assert call(f"{router.url}/v1/completions", [1])[2]["error"]["code"] == "invalid_json"
    assert call(f"{router.url}/v1/nothing")[0] == 404
    assert call(f"{router.url}/v1/nothing", {})[0] == 404
    for replica in router.fleet.replicas:
        assert router.fleet.router.load(replica) == 0, "an error leaves a request behind"


def test_a_replica_that_is_held_back_gets_nothing(router: RouterHandle) -> None:
    first, second = router.fleet.replicas
    status, _, listed = call(f"{router.url}/v1/replicas/drain", {"replica": first})
    assert status == 200 and [each["takes_requests"] for each in listed["data"]] == [False, True]
    for i in range(4):
        assert call(f"{router.url}/v1/completions", {"prompt": f"{i} {FOX}", "max_tokens": 1})[0] == 200
    counts = call(f"{router.url}/metrics")[2]
    assert f'router_requests_total{{replica="{first}"}} 0.0' in counts
    assert f'router_requests_total{{replica="{second}"}} 4.0' in counts
    call(f"{router.url}/v1/replicas/drain", {"replica": second})
    status, headers, error = call(f"{router.url}/v1/completions", {"prompt": "x"})
    assert (status, error["error"]["code"]) == (503, "no_replica") and "retry-after" in headers
    assert call(f"{router.url}/ready")[0] == 503 and call(f"{router.url}/health")[0] == 200
    call(f"{router.url}/v1/replicas/resume", {"replica": second})
    assert call(f"{router.url}/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    assert call(f"{router.url}/v1/replicas/drain", {"replica": "http://other"})[0] == 404


def test_a_replica_that_drains_loses_no_request(router: RouterHandle, servers: list[ServerHandle]) -> None:
    servers[0].drain(20.0)
    answers = [call(f"{router.url}/v1/completions", {"prompt": f"{i} {FOX}", "max_tokens": 2})[0] for i in range(8)]
    assert answers == [200] * 8
    servers[0].wait()
    router.until_ready(1)


def test_keys_are_checked_once_and_replicas_know_whose_request_it_is(engines: list[Engine], tmp_path: Path) -> None:
    """The router shows a key of its own. Callers keep their names: caches are salted by them."""
    theirs, ours = tmp_path / "replica.toml", tmp_path / "router.toml"
    router_key, plain_key = add_key("router", theirs, router=True), add_key("plain", theirs)
    alice, bob = add_key("alice", ours), add_key("bob", ours)
    with ours.open("a") as file:
        file.write("max_requests = 2\n")  # of bob
    config = ServerConfig(api_keys_file=theirs)
    with (
        ServerHandle(engines[0], config=config) as server,
        routed([root(server)], ServerConfig(api_keys_file=ours), router_key) as router,
    ):
        url, ask = f"{router.url}/v1/completions", {"prompt": f"mine {FOX}", "max_tokens": 1}
        assert call(url, ask)[0] == 401 and call(url, ask, Authorization=f"Bearer {router_key}")[0] == 401
        cached = [
            int(call(url, ask, Authorization=f"Bearer {key}")[1]["x-cached-tokens"]) for key in (alice, alice, bob)
        ]
        assert cached[0] == cached[2] == 0 < cached[1], "another caller found alice's prompt"
        status, _, error = call(url, ask | {"n": 3}, Authorization=f"Bearer {bob}")
        assert (status, error["error"]["code"]) == (429, "rate_limit_exceeded")
        assert call(f"{router.url}/metrics", Authorization=f"Bearer {alice}")[0] == 403
        assert call(f"{router.url}/v1/replicas", Authorization=f"Bearer {alice}")[0] == 403
        # Nobody else can say for whom it asks.
        caller = json.dumps({"name": "alice", "weight": 1, "priority": -9})
        direct = f"{server.url}/completions"
        forged = call(direct, ask, Authorization=f"Bearer {plain_key}", **{"X-Qserve-Caller": caller})
        assert forged[0] == 200 and forged[1]["x-cached-tokens"] == "0"
        assert call(direct, ask, Authorization=f"Bearer {router_key}", **{"X-Qserve-Caller": "{}"})[0] == 400
        through = call(url, ask, Authorization=f"Bearer {bob}", **{"X-Qserve-Caller": caller})
        assert through[0] == 200 and int(through[1]["x-cached-tokens"]) > 0  # bob's own


def test_a_client_that_leaves_ends_its_request(router: RouterHandle, servers: list[ServerHandle]) -> None:
    host, port = router.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": FOX, "max_tokens": 400, "ignore_eos": True, "stream": True})
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: all(idle(server) for server in servers))
    wait_until(lambda: not any(router.fleet.router.load(url) for url in router.fleet.replicas))


def test_a_path_is_passed_on_as_it_was_written(router: RouterHandle) -> None:
    status, _, error = call(f"{router.url}/v1/x%0d%0aX-Qserve-Caller:%20y?a=%0d", {})
    assert status == 404 and "there is no route POST" in error["error"]["message"]


def test_the_wrong_replica_key_is_seen_at_once(engines: list[Engine]) -> None:
    config = ServerConfig(api_keys=("right",))
    with ServerHandle(engines[0], config=config) as server, routed([root(server)], key="wrong", ready=0) as router:
        status, _, error = call(f"{router.url}/v1/completions", {"prompt": "x"})
        assert (status, error["error"]["code"]) == (503, "no_replica")


def test_the_router_knows_every_route_of_a_server_and_passes_nothing_else_on(servers: list[ServerHandle]) -> None:
    paths = call(root(servers[0]) + "/openapi.json")[2]["paths"]
    posted = {path for path, methods in paths.items() if "post" in methods}
    adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # where there is a directory of them
    assert len(posted) > 9 and posted | adapters == FORWARDED_ROUTES
    with routed([root(each) for each in servers]) as router:
        for method, path, status in (
            ("POST", KV_PATH, 401), ("GET", "/v1/engine", 404), ("POST", "/v1/prefixes/events", 404),
            ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/health", 405),
        ):  # fmt: skip
            request = urllib.request.Request(router.url + path, method=method)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request)
            assert caught.value.code == status, path
            assert status != 405 or caught.value.headers["Allow"] in ("GET", "POST")
        assert router.fleet.num_ready == 2
