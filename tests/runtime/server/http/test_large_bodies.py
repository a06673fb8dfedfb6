"""A body that is refused before it is read: however the client sends it, it reads why, and no other client waits."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from qserve.runtime.server.http import lingering_close
from qserve.runtime.server.limits.shared_pool import SharedPool
from qserve.runtime.server.serve import ServerHandle

from ..waiting import wait_until

KEY = {"Authorization": "Bearer first-key", "Content-Type": "application/json"}
CHUNK = b"a" * (1 << 16)
CLOSE = {"Connection": "close"}


def chunks(mebibytes: int) -> Iterator[bytes]:
    return itertools.repeat(CHUNK, mebibytes * 16)


def by_http_client(server: ServerHandle, size: int, headers: dict[str, str], chunked: bool) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    length = {} if chunked else {"Content-Length": str(size << 20)}
    connection.request("POST", "/v1/completions", chunks(size), headers | length, encode_chunked=chunked)
    answer = connection.getresponse()
    return answer.status, answer.read()


def by_urllib(server: ServerHandle, size: int, headers: dict[str, str], chunked: bool) -> tuple[int, bytes]:
    length = {} if chunked else {"Content-Length": str(size << 20)}
    request = urllib.request.Request(f"{server.url}/completions", chunks(size), headers | length)  # always closes
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def by_httpx(server: ServerHandle, size: int, headers: dict[str, str], chunked: bool) -> tuple[int, bytes]:
    length = {} if chunked else {"Content-Length": str(size << 20)}
    answer = httpx.post(f"{server.url}/completions", content=chunks(size), headers=headers | length, timeout=60)
    return answer.status_code, answer.content


@pytest.mark.parametrize("ask", [by_http_client, by_urllib, by_httpx])
@pytest.mark.parametrize("size", [9, 33, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("closing", [False, True], ids=["stays", "closes"])
def test_the_client_reads_the_refusal(
    server: ServerHandle, ask: Callable[..., tuple[int, bytes]], size: int, chunked: bool, closing: bool
) -> None:
    for key, status in ((KEY, 413), (KEY | {"Authorization": "Bearer wrong"}, 401)):
        got, body = ask(server, size, key | CLOSE if closing else key, chunked)
        assert got == status and json.loads(body)["error"]["message"]


def start(server: ServerHandle, *headers: str, size: int = 33 << 20) -> socket.socket:
    sock = socket.create_connection((server.host, server.port), timeout=30)
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Authorization: Bearer first-key"]
    lines += ["Content-Type: application/json", f"Content-Length: {size}"]
    sock.sendall("\r\n".join([*lines, *headers, "", ""]).encode())
    return sock


def answer(sock: socket.socket) -> tuple[int, Any]:
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response.status, json.loads(response.read())


@pytest.mark.parametrize("headers", [(), ("Connection: close",), ("Expect: 100-continue",)])
def test_the_answer_does_not_wait_for_the_body(server: ServerHandle, headers: tuple[str, ...]) -> None:
    with start(server, *headers) as sock:
        assert answer(sock)[0] == 413
        for chunk in chunks(33):  # nobody resets the connection of a client that sends first and reads later
            sock.sendall(chunk)


def test_a_body_that_never_comes_is_not_waited_for(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering_close, "LINGER_SECONDS", 0.2)
    with start(server, "Connection: close") as sock:
        assert answer(sock)[0] == 413
        assert sock.recv(1) == b"", "the server has closed it"


def test_slow_uploads_of_one_key_leave_room_for_others(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "uploads", uploads := SharedPool(5_000_000))
    with contextlib.ExitStack() as stack:
        for arrived in (1_000_000, 2_000_000):
            sock = stack.enter_context(start(server, size=8 << 20))
            sock.sendall(b"a" * 1_000_000)
            wait_until(lambda arrived=arrived: uploads.size - uploads.free == arrived)
        body = {"prompt": "the", "max_tokens": 3, "pad": "a" * 700_000}
        answers = [
            httpx.post(f"{server.url}/completions", json=body, headers=KEY | {"Authorization": f"Bearer {key}-key"})
            for key in ("first", "second")
        ]
        # The second is refused for its unknown field, so it has been read.
        assert [each.status_code for each in answers] == [503, 400] and answers[0].headers["retry-after"] == "1"
        assert answers[0].json()["error"]["code"] == "uploads_full"
    wait_until(lambda: uploads.free == uploads.size)


def test_a_body_that_is_taken_is_not_touched(server: ServerHandle) -> None:
    body = {"prompt": "the", "max_tokens": 3, "ignore_eos": True}
    for stream in (False, True):
        got = httpx.post(f"{server.url}/completions", json=body | {"stream": stream}, headers=KEY | CLOSE, timeout=60)
        assert got.status_code == 200 and got.headers["connection"] == "close"
