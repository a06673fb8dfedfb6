"""A stream that has nothing to say yet keeps its connection."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from qserve.runtime.engine import Engine
from qserve.runtime.server.http import streaming
from qserve.runtime.server.serve import ServerHandle

from ..waiting import idle, wait_until

# With log-probabilities each token is an event, be its text empty.
BODY: dict[str, Any] = {"prompt": "the", "max_tokens": 4, "ignore_eos": True, "stream": True, "logprobs": 0}


class Gate:
    """A runner that waits before some of its steps."""

    def __init__(self, runner: Any, before: set[int]) -> None:
        self._runner, self._before, self._steps = runner, before, 0
        self.opened = threading.Event()

    def run(self, *arguments: Any) -> Any:
        self._steps += 1
        if self._steps in self._before:
            assert self.opened.wait(20)
        return self._runner.run(*arguments)


@pytest.fixture
def own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerHandle]:
    monkeypatch.setattr(streaming, "HEARTBEAT_SECONDS", 0.1)
    with ServerHandle(engine) as server:
        yield server
    engine.check()


@pytest.mark.parametrize("step", [1, 3], ids=["before its first token", "later"])
def test_comments_come_while_a_request_waits(
    own: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(engine, "runner", gate := Gate(engine.runner, {step}))
    lines = []
    with httpx.stream("POST", f"{own.url}/completions", json=BODY, timeout=20) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            lines.append(line)
            if lines.count(": waiting") == 3:
                gate.opened.set()
    data = [line for line in lines if line.startswith("data: ")]
    assert lines.count(": waiting") >= 3 and data[-1] == "data: [DONE]" and len(data) > 4
    assert (lines.index(": waiting") < lines.index(data[0])) == (step == 1)
    assert set(lines) == {*data, ": waiting", ""}


def test_the_official_client_reads_over_them(
    own: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "runner", gate := Gate(engine.runner, {1}))
    threading.Timer(0.5, gate.opened.set).start()
    with openai.OpenAI(base_url=own.url, api_key="none", max_retries=0, timeout=20) as client:
        chunks = list(client.completions.create(model=own.service.model_name, prompt="the", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason


def test_what_fails_while_it_waits_is_the_last_event(
    own: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "runner", gate := Gate(engine.runner, {1}))
    threading.Timer(0.5, gate.opened.set).start()
    answer = httpx.post(f"{own.url}/completions", json=BODY | {"timeout": 0.2}, timeout=20)
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert answer.status_code == 200 and '"type":"timeout"' in events[-1]
    assert httpx.post(f"{own.url}/completions", json=BODY | {"max_tokens": 0}, timeout=20).status_code == 400


def test_a_client_that_leaves_while_it_waits_takes_its_request_along(
    own: ServerHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "runner", gate := Gate(engine.runner, {1}))
    with httpx.stream("POST", f"{own.url}/completions", json=BODY | {"max_tokens": 400}, timeout=20) as stream:
        assert next(stream.iter_lines()) == ": waiting"
    time.sleep(0.2)
    gate.opened.set()
    wait_until(lambda: idle(own))


def test_whoever_leaves_costs_no_warnings(own: ServerHandle, caplog: pytest.LogCaptureFixture) -> None:
    """Each step writes 64 events. When the first of them finds the connection broken, the others are not written."""
    body = json.dumps(BODY | {"max_tokens": 400, "n": 64}).encode()
    with caplog.at_level(logging.WARNING, "asyncio"):
        for _ in range(80):
            with socket.create_connection((own.host, own.port), timeout=20) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is a reset
                sock.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
                )
                assert sock.recv(12) == b"HTTP/1.1 200"
            wait_until(lambda: idle(own))
    assert not [record for record in caplog.records if record.name == "asyncio"]
