"""Clients that leave, steps that fail, queues that fill, and a server that ends."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import QServeError
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http import connection
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.serve import ServerHandle, serve

from .conftest import Slow
from .waiting import idle, wait_until

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
LONG = {"prompt": "the", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def own(engine: Engine) -> Iterator[ServerHandle]:
    """A server without keys for one test alone."""
    with ServerHandle(engine, config=ServerConfig(body_timeout=0.5)) as handle:
        yield handle
    engine.check()
    assert engine.stats().kv_blocks_used == engine.stats().num_running == engine.stats().num_waiting == 0


def post(server: ServerHandle, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/completions", json=body, timeout=60)


def test_leaving_a_stream_frees_its_blocks(own: ServerHandle, slow: None) -> None:
    with httpx.stream("POST", f"{own.url}/completions", json=LONG | {"stream": True, "n": 3}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_until(lambda: own.service.engine.stats.kv_blocks_used > 0)
    wait_until(lambda: idle(own), 3)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_byte(own: ServerHandle, slow: None, stream: bool) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{own.url}/completions",
            json=LONG | {"prompt": [5] * 100, "stream": stream, "stop": "z" * 1000},
            timeout=0.03 if stream else 0.3,
        )
    wait_until(lambda: idle(own), 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/messages", {"max_tokens": 400, "messages": [{"role": "user", "content": "the"}]}),
        ("/rerank", {"query": "a", "documents": [f"{i} " + "b " * 200 for i in range(30)], "pooling": "last"}),
    ],
)
def test_leaving_other_routes(
    own: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(engine, "runner", Slow(engine.runner, 0.3))  # all of it would take 6 seconds or more
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{own.url}{path}", json=body, timeout=0.2)
    wait_until(lambda: idle(own), 3)


@pytest.fixture
def thousands_of_files() -> Iterator[None]:
    """For both ends of every connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("no process may have so many open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_thousand_aborts_at_once(own: ServerHandle, slow: None, thousands_of_files: None) -> None:
    sockets = []
    body = json.dumps(LONG | {"stream": True}).encode()
    head = f"{HEAD}{len(body)}\r\n\r\n".encode()
    for _ in range(1000):
        sock = socket.create_connection((own.host, own.port))
        sock.sendall(head + body)
        sockets.append(sock)
    wait_until(lambda: own.service.engine.stats.num_running > 0)
    for sock in sockets:
        sock.close()
    wait_until(lambda: not own._server.server_state.tasks and idle(own))
    assert post(own, {"prompt": "the"}).status_code == 200


def test_a_failing_step_ends_its_requests_and_nothing_else(
    own: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, run, calls = engine.runner, engine.runner.run, 0

    def fail_at_fifth(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("a kernel broke")
        time.sleep(0.01)
        return run(*arguments)

    monkeypatch.setattr(runner, "run", fail_at_fifth)
    with httpx.stream("POST", f"{own.url}/completions", json=LONG | {"stream": True}, timeout=10) as stream:
        events = [line for line in stream.iter_lines() if line]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "kernel broke" not in error["message"]
    assert post(own, LONG | {"max_tokens": 8}).json()["usage"]["completion_tokens"] == 8
    assert httpx.get(own.url.replace("/v1", "/health")).status_code == 200

    calls = 4
    response = post(own, LONG)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    wait_until(lambda: idle(own))


def test_a_full_queue_is_503_with_a_time_to_come_back(own: ServerHandle, engine: Engine, slow: None) -> None:
    limit = engine.scheduler.config.max_waiting
    many = {"prompt": ["the"] * min(1024, limit), "max_tokens": 30}
    with httpx.stream("POST", f"{own.url}/completions", json=many | {"stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()  # kept: when it goes, the connection is closed
        next(lines)
        response = post(own, {"prompt": ["the"] * 1000})
        assert response.status_code == 503
        assert 1 <= int(response.headers["retry-after"]) <= 120
        assert response.json()["error"]["code"] == "queue_full"
    wait_until(lambda: idle(own))


def test_a_full_queue_refuses_while_a_step_runs(
    own: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end, run = Event(), Event(), engine.runner.run

    def held(*arguments: Any) -> Any:
        begun.set()
        end.wait(30)
        return run(*arguments)

    monkeypatch.setattr(engine.runner, "run", held)
    limit = engine.scheduler.config.max_waiting
    half = {"prompt": ["the"] * (limit // 2), "max_tokens": 1}
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(post, own, {"prompt": "the", "max_tokens": 1})
        assert begun.wait(10)  # from here on the engine looks at nothing
        waiting = [pool.submit(post, own, half) for _ in range(2)]
        try:
            wait_until(lambda: own.service.engine.num_arriving == limit)
            refused = httpx.post(f"{own.url}/completions", json={"prompt": "the"}, timeout=5)
        finally:
            end.set()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
        assert {future.result().status_code for future in (first, *waiting)} == {200}


def test_a_body_that_does_not_come(own: ServerHandle) -> None:
    with socket.create_connection((own.host, own.port)) as sock:
        sock.sendall(f"{HEAD}100\r\n\r\n{{".encode())
        sock.settimeout(5)
        assert b" 408 " in sock.recv(4096).split(b"\r\n")[0]


def test_a_client_that_never_reads_holds_nobody_up(own: ServerHandle) -> None:
    body = json.dumps(LONG | {"stream": True, "n": 4, "logprobs": 20}).encode()
    with socket.create_connection((own.host, own.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.sendall(f"{HEAD}{len(body)}\r\n\r\n".encode() + body)
        assert post(own, {"prompt": "the", "max_tokens": 4}).status_code == 200
        wait_until(lambda: idle(own), 60)


def test_draining_lets_streams_end_and_refuses_new_ones(engine: Engine, slow: None) -> None:
    with ServerHandle(engine) as server, ThreadPoolExecutor(1) as pool:
        base = server.url.removesuffix("/v1")
        assert httpx.get(f"{base}/ready").json() == {"status": "ready"}
        running = pool.submit(post, server, LONG | {"max_tokens": 40})
        wait_until(lambda: server.service.engine.stats.num_running == 1)
        server.drain(30)
        assert httpx.get(f"{base}/ready").status_code == 503
        assert httpx.get(f"{base}/health").status_code == 200
        refused = post(server, LONG)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert running.result().json()["usage"]["completion_tokens"] == 40
        server._thread.join(5)
        assert not server._thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        post(server, LONG)


def test_a_drain_that_takes_too_long_tells_the_client(engine: Engine, slow: None) -> None:
    with ServerHandle(engine) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, server, LONG)
        wait_until(lambda: server.service.engine.stats.num_running == 1)
        server.drain(0.3)
        assert running.result().status_code == 500
        assert "shutting down" in running.result().json()["error"]["message"]
    assert idle(server)


def test_a_port_in_use_is_one_clear_line() -> None:
    with claim_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(QServeError, match=f"port {port} on 127.0.0.1 is in use"):
            claim_socket("127.0.0.1", port)
    for host, bad in (("127.0.0.1", 70000), ("no.such.host.invalid", 80)):
        with pytest.raises(QServeError, match="cannot listen on"):
            claim_socket(host, bad)


@pytest.fixture
def sigterm_is_ours() -> Iterator[None]:
    """One that comes when no server runs any more must not end the tests."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


def to_the_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def to_a_thread() -> None:
    """It does not wake the main thread. Nor does one to the process that comes just before that thread sleeps."""
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


@pytest.mark.usefixtures("sigterm_is_ours")
@pytest.mark.parametrize("kill", [to_the_process, to_a_thread])
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_drains_and_a_second_one_aborts(
    engine: Engine, slow: None, signals: int, kill: Callable[[], None]
) -> None:
    """Served in the main thread of this process, as ``qserve run`` does."""
    sock = claim_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    def ready() -> int:
        return httpx.get(f"{url}/ready", timeout=20).status_code

    def terminate() -> None:
        kill()
        wait_until(lambda: ready() == 503)

    def last_event() -> str:
        try:
            wait_until(lambda: ready() == 200)
            body = LONG | {"max_tokens": 50 if signals == 1 else 400, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                terminate()
                if signals == 2:
                    kill()
                return [line for line in lines if line][-1]
        except BaseException:
            to_the_process()
            to_the_process()  # or it would be served for ever
            raise

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(last_event)
        serve(engine, sock=sock)
        assert told.result() == "data: [DONE]" if signals == 1 else "shutting down" in told.result()
    engine.check()
    assert engine.stats().num_running == 0


def test_a_connection_that_says_nothing_is_closed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT", 0.3)
    with ServerHandle(engine) as server:
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: "):
            with socket.create_connection(("127.0.0.1", server.port)) as silent:
                silent.sendall(sent)
                silent.settimeout(5)
                assert silent.recv(100) == b""
        assert httpx.get(f"http://127.0.0.1:{server.port}/health").status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: "], ids=["nothing", "half a head"])
def test_a_connection_that_falls_silent_after_a_request_is_closed(engine: Engine, sent: bytes) -> None:
    server = ServerHandle(engine)
    server._server.config.timeout_keep_alive = 0.3  # type: ignore[assignment]
    with server, socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.settimeout(5)
        for _ in range(2):
            silent.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            response = http.client.HTTPResponse(silent)
            response.begin()
            assert response.status == 200 and response.read()
        silent.sendall(sent)
        assert silent.recv(100) == b""
