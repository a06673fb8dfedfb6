"""Completions over a WebSocket, with the client of the websockets package."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.limits.shared_pool import SharedPool
from qserve.runtime.server.serve import ServerHandle

from ..waiting import idle, wait_until

HEADERS = {"Authorization": "Bearer first-key"}
ASKED: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0, "ignore_eos": True}
COMPLETION = ASKED | {"prompt": "the quick"}
CHAT = ASKED | {"messages": [{"role": "user", "content": "hello"}]}


def dial(server: ServerHandle, path: str, **options: Any) -> ClientConnection:
    options = {"additional_headers": HEADERS} | options
    return connect(f"{server.url.replace('http', 'ws', 1)}{path}/ws", **options)


def ask(connection: ClientConnection, body: Any) -> list[dict[str, Any]]:
    """All messages of one answer."""
    connection.send(body if isinstance(body, str | bytes) else json.dumps(body))
    messages = []
    while not messages or not {"done", "error"} & messages[-1].keys():
        messages.append(json.loads(connection.recv(timeout=30)))
    return messages


def events(server: ServerHandle, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, headers=HEADERS, timeout=60) as stream:
        return [json.loads(line[6:]) for line in stream.iter_lines() if line and line != "data: [DONE]"]


def timeless(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if key not in ("id", "created")} for each in messages]


@pytest.mark.parametrize(("path", "body"), [("/completions", COMPLETION), ("/chat/completions", CHAT)])
def test_the_messages_are_the_events(server: ServerHandle, path: str, body: dict[str, Any]) -> None:
    body = body | {"stream_options": {"include_usage": True}, "n": 2}
    events(server, path, body)  # from now on the prompt is cached, as usage tells
    expected = timeless(events(server, path, body))
    with dial(server, path) as connection:
        for _ in range(3):  # one after the other on one connection
            *chunks, done = ask(connection, body | {"stream": True})
            assert done == {"done": True}
            assert timeless(chunks) == expected and len(chunks) > 10
        del body["stream_options"]
        *chunks, done = ask(connection, body)  # a stream is what one has unless it is declined
        assert len(chunks) > 10
        whole, done = ask(connection, body | {"stream": False})
        assert done == {"done": True} and len(whole["choices"]) == 2
        assert len({chunk["id"] for chunk in chunks} | {whole["id"]}) == 2


def test_errors_leave_the_connection_open(server: ServerHandle) -> None:
    with dial(server, "/completions") as connection:
        for body, param in (
            ({}, "prompt"),
            (COMPLETION | {"max_tokens": 0}, "max_tokens"),
            (COMPLETION | {"unheard_of": 1}, "unheard_of"),
            ("no json", None),
            ("[1]", None),
            ('{"prompt": "a", "prompt": "b"}', None),
            ('{"prompt": NaN}', None),
            ("[" * 200_000, None),
        ):
            (message,) = ask(connection, body)
            assert message["error"]["type"] == "invalid_request_error"
            assert message["error"]["param"] == param
        assert ask(connection, COMPLETION)[-1] == {"done": True}


def test_an_error_in_the_middle_is_the_last_message(server: ServerHandle, slow: None) -> None:
    with dial(server, "/completions") as connection:
        *chunks, error = ask(connection, COMPLETION | {"max_tokens": 400, "timeout": 0.5})
        assert len(chunks) > 1 and error["error"]["type"] == "timeout"
        assert ask(connection, COMPLETION)[-1] == {"done": True}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_it_wants_a_key(server: ServerHandle, headers: dict[str, str]) -> None:
    for path in ("/completions", "/chat/completions", "/nothing"):
        with pytest.raises(InvalidStatus) as caught:
            dial(server, path, additional_headers=headers)
        assert caught.value.response.status_code == 401
        assert json.loads(caught.value.response.body or b"")["error"]["code"] == "invalid_api_key"
    with pytest.raises(InvalidStatus):
        dial(server, "/nothing")


@pytest.fixture
def own(engine: Engine) -> Iterator[ServerHandle]:
    with ServerHandle(engine, config=ServerConfig(max_message_bytes=100_000)) as handle:
        yield handle
    engine.check()
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("politely", [True, False])
def test_closing_aborts(own: ServerHandle, slow: None, politely: bool) -> None:
    connection = dial(own, "/completions")
    connection.send(json.dumps(COMPLETION | {"max_tokens": 400}))
    connection.recv(timeout=30)
    wait_until(lambda: not idle(own), 5)  # the numbers of a step are known a little after its first token
    if politely:
        connection.close()
    else:
        connection.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: idle(own), 5)


@pytest.mark.parametrize(
    ("messages", "code"),
    [(["a" * 200_000], 1009), ([b"{}"], 1003), ([json.dumps(COMPLETION | {"max_tokens": 400})] * 9, 1008)],
    ids=["too large", "binary", "too many"],
)
def test_what_ends_a_connection(own: ServerHandle, slow: None, messages: list[Any], code: int) -> None:
    with dial(own, "/completions") as connection, pytest.raises(ConnectionClosed) as caught:
        for message in messages:
            connection.send(message)
        while True:
            connection.recv(timeout=30)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == code
    wait_until(lambda: idle(own))


def test_open_sockets_leave_room_for_others(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "uploads", SharedPool(11 << 19))
    with ExitStack() as stack:
        first, _ = (stack.enter_context(dial(server, "/completions")) for _ in range(2))
        with pytest.raises(InvalidStatus) as caught:
            dial(server, "/completions")
        assert caught.value.response.status_code == 503
        other = stack.enter_context(
            dial(server, "/completions", additional_headers={"Authorization": "Bearer second-key"})
        )
        for connection in (first, other):
            assert ask(connection, COMPLETION)[-1] == {"done": True}
    wait_until(lambda: server.service.uploads.free == 11 << 19)


def test_a_client_that_never_reads_holds_nobody_up(own: ServerHandle) -> None:
    with dial(own, "/completions", close_timeout=0.2) as connection:
        connection.send(json.dumps(COMPLETION | {"max_tokens": 150, "n": 4, "logprobs": 20}))
        answer = httpx.post(f"{own.url}/completions", json=COMPLETION, timeout=60)
        assert answer.status_code == 200
        wait_until(lambda: idle(own), 60)


def test_draining_ends_idle_connections_and_no_answer(engine: Engine, slow: None) -> None:
    with ServerHandle(engine) as server:
        quiet, busy = dial(server, "/completions"), dial(server, "/completions")
        busy.send(json.dumps(COMPLETION | {"max_tokens": 40}))
        received = [json.loads(busy.recv(timeout=30))]
        server.drain(30.0)
        with pytest.raises(ConnectionClosed) as caught:
            quiet.recv(timeout=30)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1001
        while "done" not in received[-1]:
            received.append(json.loads(busy.recv(timeout=30)))
        assert received[-2]["choices"][0]["finish_reason"] == "length"
        with pytest.raises(ConnectionClosed):
            busy.recv(timeout=30)
        server.wait()


def test_idle_connections_cost_nothing(own: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    call_at = asyncio.BaseEventLoop.call_at

    def counted(loop: asyncio.BaseEventLoop, when: float, *arguments: Any, **context: Any) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(loop, when, *arguments, **context)

    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(dial(own, "/completions"))
        monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", counted)
        time.sleep(1.0)
        assert 5 < len(timers) < 25, "those of the server itself, ten a second"


def test_an_idle_connection_outlives_the_header_timeout(own: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.runtime.server.http.connection.HEADER_TIMEOUT", 0.2)
    with dial(own, "/completions") as connection, socket.create_connection((own.host, own.port)) as silent:
        silent.settimeout(10)
        assert silent.recv(1) == b""  # closed: that time has passed for both
        assert ask(connection, COMPLETION)[-1] == {"done": True}
