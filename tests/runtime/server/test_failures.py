"""A model that is not there yet, an engine that fails for good, a step that never ends, logits that are NaN."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import QServeError
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.serve import ServerHandle, serve

from .waiting import wait_until

BODY = {"prompt": "the", "max_tokens": 8, "ignore_eos": True}


def status(url: str) -> tuple[int, str]:
    response = httpx.get(url, timeout=20)
    return response.status_code, response.json()["status"]


def test_while_the_model_loads_the_server_is_alive_and_not_ready(engine: Engine) -> None:
    go, failed = threading.Event(), QServeError("this model cannot be read")

    def load() -> Engine:
        go.wait(60)
        raise failed

    sock = claim_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, load, sock=sock)
        assert status(f"{base}/health") == (200, "loading")
        assert status(f"{base}/ready") == (503, "loading")
        refused = httpx.post(f"{base}/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        assert int(refused.headers["retry-after"]) >= 1
        go.set()
        assert served.exception(60) is failed
    claim_socket("127.0.0.1", port).close()


def test_nan_logits_fail_their_request_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine.runner.run

    def poisoned(plan: Any, deliver: Any) -> Any:
        output = run(plan, deliver)
        for place, key in enumerate(output.request_ids):
            if engine._choices[key].sequence.prompt_token_ids[0] == 7:
                output.logits[place], output.greedy[place] = float("nan"), -1  # what kernels make of a NaN
        return output

    with ServerHandle(engine) as server, ThreadPoolExecutor(2) as pool:
        url = f"{server.url}/completions"
        sampled = {"temperature": 1.0, "seed": 3}
        expected = httpx.post(url, json=BODY | sampled, timeout=60).json()["choices"]
        monkeypatch.setattr(engine.runner, "run", poisoned)
        good = pool.submit(httpx.post, url, json=BODY | sampled, timeout=60)
        bad = pool.submit(httpx.post, url, json=BODY | sampled | {"prompt": [7, 8]}, timeout=60)
        assert bad.result().status_code == 500 and "NaN" in bad.result().json()["error"]["message"]
        assert good.result().json()["choices"] == expected
        assert status(server.url.replace("/v1", "/health")) == (200, "ok")
    engine.check()


@pytest.mark.slow
def test_an_engine_that_always_fails_ends_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError("a broken kernel")

    sock = claim_socket("127.0.0.1", 0)
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    monkeypatch.setattr(engine.runner, "run", broken)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, engine, sock=sock)
        wait_until(lambda: status(f"{base}/ready") == (200, "ready"))
        with httpx.Client(timeout=20) as client:  # one connection, which outlives the listening socket
            for _ in range(10):
                assert client.get(f"{base}/health").json() == {"status": "ok"}
                failed = client.post(f"{base}/v1/completions", json=BODY)
                assert failed.status_code == 500 and "broken kernel" not in failed.text
            wait_until(lambda: client.get(f"{base}/health").status_code == 503)
            assert client.post(f"{base}/v1/completions", json=BODY).status_code == 503
        assert "10 steps of the engine in a row failed" in str(served.exception(60))
    claim_socket("127.0.0.1", int(base.rpartition(":")[2])).close()
    engine.check()


def test_a_panic_ends_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library in Rust raises is no ``Exception``."""

    class Panic(BaseException):
        pass

    def panic(*arguments: Any) -> Any:
        raise Panic

    sock = claim_socket("127.0.0.1", 0)
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    monkeypatch.setattr(engine.runner, "run", panic)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, engine, sock=sock)
        wait_until(lambda: status(f"{base}/ready") == (200, "ready"))
        assert httpx.post(f"{base}/v1/completions", json=BODY, timeout=20).status_code == 500
        assert "the engine cannot go on: Panic" in str(served.exception(20))
    engine.check()


def test_a_stuck_step_ends_its_streams_and_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, stuck, release = engine.runner.run, threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        if stuck.is_set():
            release.wait(100)
        return run(*arguments)

    monkeypatch.setattr(engine.runner, "run", hang)
    try:
        with ServerHandle(engine, config=ServerConfig(step_timeout=1.0)) as server, httpx.Client(timeout=60) as client:
            health = server.url.replace("/v1", "/health")
            assert client.get(health).status_code == 200
            body = BODY | {"max_tokens": 400, "stream": True}
            with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                stuck.set()
                last = [line for line in lines if line][-1]
            assert "stuck" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert client.get(health).status_code == 503
            server.wait()
        assert server._server.stuck
    finally:
        release.set()
        server.service.engine.stop(60)
    engine.check()
    assert engine.stats().kv_blocks_used == 0


# argv: the model; what a step does once the file of argv 2 is there; then what the server is told.
SCRIPT = """
    import sys, time
    from pathlib import Path
    from qserve.checkpoint.errors import QServeError
    from qserve.runtime.config import EngineConfig
    from qserve.runtime.engine import Engine
    from qserve.runtime.server.config import ServerConfig
    from qserve.runtime.server.serve import claim_socket, serve
    sock = claim_socket("127.0.0.1", 0)
    engine = Engine(sys.argv[1], EngineConfig(max_model_len=512, kv_cache_memory=8 << 20))
    run = engine.runner.run
    def slow(*arguments):
        time.sleep(0.02)
        if Path(sys.argv[2]).exists():
            if sys.argv[3] == "stuck":
                time.sleep(1000)
            raise ValueError("a broken kernel")
        return run(*arguments)
    engine.runner.run = slow
    print(sock.getsockname()[1], flush=True)
    try:
        serve(engine, sock=sock, config=ServerConfig(step_timeout=2.0))
    except QServeError as error:
        sys.exit(str(error))
"""


@contextmanager
def failing(engine: Engine, trigger: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(engine.source.path), str(trigger), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            base = f"http://127.0.0.1:{int(process.stdout.readline())}"
            wait_until(lambda: httpx.get(f"{base}/ready", timeout=20).status_code == 200)
            yield process, base
        finally:
            process.kill()


def stream_until_broken(base: str, trigger: Path) -> dict[str, Any]:
    """Begin a stream, break the engine, and return the stream's last event."""
    body = BODY | {"max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        trigger.touch()
        last = [line for line in lines if line][-1]
    return dict(json.loads(last.removeprefix("data: ")))


def port_of(base: str) -> int:
    return int(base.rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "stuck"])
def test_a_broken_engine_ends_the_process(engine: Engine, tmp_path: Path, how: str) -> None:
    trigger = tmp_path / "broken"
    with failing(engine, trigger, how) as (process, base):
        error = stream_until_broken(base, trigger)["error"]["message"]
        assert ("stuck" if how == "stuck" else "engine failed") in error
        for _ in range(0 if how == "stuck" else 9):
            assert httpx.post(f"{base}/v1/completions", json=BODY, timeout=60).status_code == 500
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
        if how == "stuck":
            assert "the server ends" in log and "in slow" in log, "the stacks say where it hung"
        else:
            assert "10 steps of the engine in a row failed" in log
    claim_socket("127.0.0.1", port_of(base)).close()


@pytest.mark.slow
def test_a_killed_server_leaves_its_port_free(engine: Engine, tmp_path: Path) -> None:
    with failing(engine, tmp_path / "never", "raise") as (process, base):
        body = BODY | {"max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
        process.wait(60)
    claim_socket("127.0.0.1", port_of(base)).close()
