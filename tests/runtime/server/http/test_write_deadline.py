"""A client that has stopped reading loses its connection, and what waits for it is given up."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from qserve.runtime.engine import Engine
from qserve.runtime.server.http import write_deadline
from qserve.runtime.server.serve import ServerHandle

from ..waiting import idle, wait_until

ASKED: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "n": 16}
LARGE = ASKED | {"prompt": "the", "logprobs": 20}
LARGER = ASKED | {"messages": [{"role": "user", "content": "the"}], "logprobs": True, "top_logprobs": 20}
"""Answers of more megabytes than a system holds for a connection, the one in a stream of chunks, the other whole."""


@pytest.fixture
def own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerHandle]:
    """A server without keys, which waits half a second for a client to read."""
    monkeypatch.setattr(write_deadline, "WRITE_SECONDS", 0.5)
    with ServerHandle(engine) as handle:
        yield handle
    engine.check()


def connections(server: ServerHandle) -> int:
    return len(server._server.server_state.connections)


def post(server: ServerHandle, route: str, content: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read."""
    body = json.dumps(content).encode()
    sock = socket.create_connection((server.host, server.port), timeout=60)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.sendall(
        f"POST /v1/{route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return sock


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "content"), [("completions", LARGE | {"stream": True}), ("chat/completions", LARGER)]
)
def test_an_answer_over_http(own: ServerHandle, route: str, content: dict[str, Any]) -> None:
    with post(own, route, content):
        wait_until(lambda: connections(own) == 1)
        wait_until(lambda: connections(own) == 0)
        wait_until(lambda: idle(own))


@pytest.mark.slow
def test_an_answer_over_a_websocket(own: ServerHandle) -> None:
    address = f"ws://{own.host}:{own.port}/v1/completions/ws"
    with connect(address, open_timeout=30, close_timeout=0.1, ping_interval=None, max_queue=1) as connection:
        connection.send(json.dumps(LARGE))
        wait_until(lambda: connections(own) == 1)
        wait_until(lambda: connections(own) == 0)
        wait_until(lambda: idle(own))


def test_a_client_that_reads_slowly_gets_it_all(own: ServerHandle) -> None:
    with httpx.stream("POST", f"{own.url}/completions", json=LARGE | {"stream": True, "n": 4}, timeout=60) as answer:
        text = b""
        for part in answer.iter_raw(1 << 17):
            time.sleep(0.1)
            text += part
    assert text.endswith(b"data: [DONE]\n\n")
