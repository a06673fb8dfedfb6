"""Bytes that are no request, or whose head is too large: the client gets to read an error object."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import httpx
import pytest

from qserve.runtime.server.http import connection
from qserve.runtime.server.serve import ServerHandle

from ..waiting import wait_until

LINE = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
HEADS = {
    "one header of 200 KB": (LINE + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n", 431),
    "one header that never ends": (LINE + b"X-Long: " + b"a" * 4_000_000, 431),
    "a path of 200 KB": (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
    "many headers": (LINE + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n", 431),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400),
    "no number of bytes": (LINE + b"Content-Length: five\r\n\r\n", 400),
    "two ways to say how long": (LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    "an unknown coding": (LINE + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "a header without a name": (LINE + b": a\r\n\r\n", 400),
}


def answered(sock: socket.socket) -> tuple[http.client.HTTPResponse, Any]:
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response, json.loads(response.read())


def connect(server: ServerHandle) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=30)


@pytest.mark.parametrize("name", HEADS)
def test_the_client_reads_why(server: ServerHandle, name: str) -> None:
    head, status = HEADS[name]
    with connect(server) as sock:
        sock.sendall(head)
        response, body = answered(sock)
        assert response.status == status and response.headers["content-type"] == "application/json"
        assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
        assert sock.recv(1) == b"", "nothing comes after it"


def test_a_refused_head_does_not_hold_its_connection(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REFUSED_SECONDS", 0.2)
    with connect(server) as sock:
        sock.sendall(b"\r\n: nothing\r\n\r\n")
        assert answered(sock)[0].status == 400
        # Though this client never says that it is done: the number of connections is the server's own count.
        wait_until(lambda: not server._server.server_state.connections)


def test_a_body_that_goes_wrong_is_refused(server: ServerHandle) -> None:
    with connect(server) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer first-key\r\n"
        sock.sendall(head + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n")
        assert answered(sock)[0].status == 400
    assert httpx.get(server.url.replace("/v1", "/health")).status_code == 200


def test_a_body_that_goes_wrong_after_its_answer_ends_the_connection(server: ServerHandle) -> None:
    with connect(server) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer wrong\r\nConnection: close\r\n"
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        assert answered(sock)[0].status == 401
        sock.sendall(b"zzz\r\n")
        assert sock.recv(1) == b""
    assert httpx.get(server.url.replace("/v1", "/health")).status_code == 200
