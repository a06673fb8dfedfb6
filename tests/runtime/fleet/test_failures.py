"""Replicas that end in the middle: what a client has not seen is tried again, what it has seen ends with an error."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from .conftest import RouterHandle, routed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n%s\r\n"
EVENTS = HEAD % (b"text/event-stream", b"Transfer-Encoding: chunked\r\n")
PAGES = {
    "/ready": {"status": "ready"},
    "/v1/models": {"data": [{"id": "m"}]},
    "/v1/engine": {"kv": {"total": 9, "block_size": 16}},
    "/v1/usage": {"since": 1.0, "data": []},
    "/metrics": {},
}
Script = Callable[[socket.socket, str], None]


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return (HEAD % (b"application/json", length)).replace(b"200 OK", status) + body


@contextmanager
def replica(script: Script) -> Iterator[str]:
    """A server whose probes are those of qserve, and whose answers to requests are ``script``."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionResetError):
            while data := connection.recv(1 << 16):
                path = data.split()[1].decode()
                if path in PAGES:
                    connection.sendall(whole(json.dumps(PAGES[path]).encode()))
                    continue
                script(connection, path)
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@contextmanager
def fleet(*scripts: Script) -> Iterator[RouterHandle]:
    """The first replica gets the first request."""
    with ExitStack() as stack:
        router = stack.enter_context(routed([stack.enter_context(replica(script)) for script in scripts]))
        router.fleet.router.policy = "least-loaded"
        yield router


def ask(router: RouterHandle) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"{router.url}/v1/completions", b'{"prompt": "x", "stream": true}', {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def good(connection: socket.socket, path: str) -> None:
    connection.sendall(EVENTS + chunk(b'data: {"good": 1}\n\n') + chunk(b"data: [DONE]\n\n") + chunk(b""))


def silent(connection: socket.socket, path: str) -> None:
    """It ends without a word."""


def waiting(connection: socket.socket, path: str) -> None:
    connection.sendall(EVENTS + chunk(b": waiting\n\n"))


def half(connection: socket.socket, path: str) -> None:
    connection.sendall(EVENTS + chunk(b'data: {"a": 1}\n\n') + chunk(b'data: {"half'))


def full(connection: socket.socket, path: str) -> None:
    connection.sendall(whole(b'{"error": {"message": "the queue is full", "code": "queue_full"}}', b"503 Busy"))


def broken(connection: socket.socket, path: str) -> None:
    connection.sendall(whole(b'{"error": {"message": "a defect"}}', b"500 Defect"))


def half_body(connection: socket.socket, path: str) -> None:
    connection.sendall(HEAD % (b"application/json", b"Content-Length: 100\r\n") + b'{"a": ')


def locked(connection: socket.socket, path: str) -> None:
    connection.sendall(whole(b'{"error": {"message": "no valid API key was given"}}', b"401 No"))


def with_crs(connection: socket.socket, path: str) -> None:
    connection.sendall(EVENTS + chunk(b": waiting\r\n\r\n"))
    connection.sendall(chunk(b'data: {"good": 1}\r\n\r\n') + chunk(b"data: [DO") + chunk(b"NE]\r\n\r\n") + chunk(b""))


def test_lines_may_end_as_they_like() -> None:
    with fleet(with_crs, good) as router:
        assert ask(router) == (200, b': waiting\r\n\r\ndata: {"good": 1}\r\n\r\ndata: [DONE]\r\n\r\n')


@pytest.mark.parametrize("script", [silent, full, half_body, locked])
def test_what_the_client_has_not_seen_is_tried_again(script: Script) -> None:
    with fleet(script, good) as router:
        assert ask(router) == (200, b'data: {"good": 1}\n\ndata: [DONE]\n\n')


def test_comments_are_nothing_that_a_client_sees() -> None:
    with fleet(waiting, good) as router:
        assert ask(router) == (200, b': waiting\n\ndata: {"good": 1}\n\ndata: [DONE]\n\n')


def test_a_stream_that_was_seen_ends_with_an_error_event_and_no_half_event() -> None:
    with fleet(half, good) as router:
        status, body = ask(router)
        first, last, rest = body.split(b"\n\n")
        assert (status, first, rest) == (200, b'data: {"a": 1}', b"")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"


def test_a_refusal_after_comments_is_an_event() -> None:
    with fleet(waiting, broken) as router:
        assert ask(router) == (200, b': waiting\n\ndata: {"error": {"message": "a defect"}}\n\n')


def test_a_defect_of_a_replica_is_no_reason_to_try_another() -> None:
    with fleet(broken, good) as router:
        assert ask(router) == (500, b'{"error": {"message": "a defect"}}')


def test_a_request_that_ends_every_replica_stops_at_the_second() -> None:
    with fleet(silent, silent) as router:
        status, body = ask(router)
        assert status == 502 and json.loads(body)["error"]["code"] == "replica_lost"


def test_all_are_full() -> None:
    with fleet(full, full) as router:
        status, body = ask(router)
        assert status == 503 and json.loads(body)["error"]["code"] == "queue_full"


def test_as_many_are_tried_as_there_are() -> None:
    with fleet(*[full] * 12, good) as router:
        assert ask(router) == (200, b'data: {"good": 1}\n\ndata: [DONE]\n\n')


def test_a_replica_that_fails_again_and_again_is_left_alone() -> None:
    with fleet(silent, good) as router:
        first = next(iter(router.fleet.replicas))
        assert [ask(router)[0] for _ in range(8)] == [200] * 8
        lines = urllib.request.urlopen(f"{router.url}/metrics").read().decode().splitlines()
        assert f'qserve:router_requests_total{{replica="{first}"}} 5.0' in lines
