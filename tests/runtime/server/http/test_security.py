"""TLS, browsers of other origins, and which doors are open."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.authentication import AuthenticationMiddleware
from qserve.runtime.server.http.listening import claim_socket
from qserve.runtime.server.limits.keys import KeyRing
from qserve.runtime.server.serve import ServerHandle

ORIGIN = "https://chat.example.org"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {names}"
    try:
        subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


def test_tls(engine: Engine, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with ServerHandle(engine, config=ServerConfig(tls_cert=cert, tls_key=key)) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(cert))
        body = {"prompt": "the", "max_tokens": 4, "ignore_eos": True, "stream": True}
        with httpx.Client(verify=trusted, timeout=60) as client:
            assert client.post(f"{server.url}/completions", json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/models")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/models".replace("https", "http"))


def test_bad_tls_files_are_one_line(engine: Engine, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    sock = claim_socket("127.0.0.1", 0)
    for files in ((key, cert), (cert, tmp_path / "missing.pem")):
        with pytest.raises(QServeError, match="cannot use the TLS files"):
            ServerHandle(engine, sock=sock, config=ServerConfig(tls_cert=files[0], tls_key=files[1]))
    sock.close()
    with pytest.raises(UsageError, match="together"):
        ServerConfig(tls_cert=cert)


def test_pages_of_other_origins_may_call_only_where_that_was_said(engine: Engine) -> None:
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    with ServerHandle(engine, config=ServerConfig(api_keys=("a",))) as server:
        assert httpx.options(f"{server.url}/completions", headers=preflight).status_code == 401
        assert not any("access-control" in name for name in httpx.get(server.url, headers={"Origin": ORIGIN}).headers)
    with ServerHandle(engine, config=ServerConfig(api_keys=("a",), cors_origins=(ORIGIN,))) as server:
        allowed = httpx.options(f"{server.url}/completions", headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        stranger = httpx.options(f"{server.url}/completions", headers=preflight | {"Origin": "https://example.com"})
        assert stranger.status_code == 400 and "access-control-allow-origin" not in stranger.headers
        refused = httpx.get(f"{server.url}/models", headers={"Origin": ORIGIN})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    for origin in ("chat.example.org", f"{ORIGIN}/path", "https://a b"):
        with pytest.raises(UsageError, match="--cors-origin"):
            ServerConfig(cors_origins=(origin,))


def speaks(server: ServerHandle, **headers: str) -> tuple[int, int]:
    """The status of a completion, and of a WebSocket's handshake (200 where it is accepted)."""
    body = {"prompt": "the", "max_tokens": 1}
    status = httpx.post(f"{server.url}/completions", json=body, headers=headers, timeout=60).status_code
    host = headers.pop("Host", None)
    address = f"ws://{host or f'{server.host}:{server.port}'}/v1/completions/ws"
    try:
        connect(address, sock=socket.create_connection((server.host, server.port)), additional_headers=headers).close()
    except InvalidStatus as refused:
        return status, refused.response.status_code
    return status, 200


def test_web_pages_may_not_use_a_server_without_keys(engine: Engine) -> None:
    with ServerHandle(engine) as server:
        own, port = f"http://127.0.0.1:{server.port}", server.port
        for origin in (own, f"http://localhost:{port}", "http://localhost:3000", "http://[::1]:3000"):
            assert speaks(server, Origin=origin) == (200, 200), origin
        for origin in ("https://evil.example", "null", "http://192.168.1.5", "http://localhost.evil.example"):
            assert speaks(server, Origin=origin) == (403, 403), origin
        for host in ("localhost", f"LOCALHOST:{port}", "192.168.1.5:8000", "[::1]"):
            assert speaks(server, Host=host) == (200, 200), host
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example"):
            assert speaks(server, Host=host) == (403, 403), host
            assert speaks(server, Host=host, Origin=f"http://{host}") == (403, 403), "a name that was rebound"
        assert httpx.get(f"{own}/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(f"{own}/health", headers={"Host": "evil.example"}).status_code == 200, "probes are open"


def test_a_server_without_keys_is_told_its_names_and_whose_pages_may_call(engine: Engine) -> None:
    config = ServerConfig(allowed_hosts=("llm.example.org",), cors_origins=(ORIGIN,))
    with ServerHandle(engine, config=config) as server:
        assert speaks(server, Host="LLM.example.org:8000", Origin="http://LLM.example.org:8000") == (200, 200)
        assert speaks(server, Origin=ORIGIN) == (200, 200)
        assert speaks(server, Host="other.example.org") == speaks(server, Origin="https://example.com") == (403, 403)
    for name in ("http://a", "a:80", "", "*"):
        with pytest.raises(UsageError, match="--allowed-hosts"):
            ServerConfig(allowed_hosts=(name,))


def test_keys_are_enough(engine: Engine) -> None:
    """A page does not know them."""
    with ServerHandle(engine, config=ServerConfig(api_keys=("a",))) as server:
        headers = {"Authorization": "Bearer a", "Origin": "https://a.example", "Host": "a.example"}
        assert speaks(server, **headers) == (200, 200)


def test_a_body_that_is_not_sent_as_json_is_refused(engine: Engine) -> None:
    """What a page may send anywhere without asking: a form, text, or bytes that say nothing of themselves."""
    body = b'{"prompt": "the", "max_tokens": 1}'
    with ServerHandle(engine) as server:

        def status(kind: str | None) -> int:
            headers = {} if kind is None else {"Content-Type": kind}
            return httpx.post(f"{server.url}/completions", content=body, headers=headers, timeout=60).status_code

        for kind in (None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
            assert status(kind) == 415, kind
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
            assert status(kind) == 200, kind


def through_guard(scope: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the guard sends, and the scope as the application sees it (empty if it does not)."""
    sent: list[dict[str, Any]] = []
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(AuthenticationMiddleware(app, KeyRing(["secret"]))({"headers": [], **scope}, None, send))  # type: ignore[arg-type]
    return sent, seen


def test_open_doors_are_exactly_the_probes_and_the_static_page() -> None:
    for path in ("/health", "/ready", "/", "/static/page.js"):
        assert through_guard({"type": "http", "path": path})[1]["qserve.tenant"] == ""
    closed = ("/metrics", "/v1/models", "/health/", "//", "/static", "/static/../v1/models", "/staticx/a", "")
    for path in closed:
        sent, seen = through_guard({"type": "http", "path": path})
        assert sent[0]["status"] == 401 and not seen, path


def test_websockets_show_their_key_before_they_are_accepted() -> None:
    for path in ("/v1/stream", "/", "/health"):
        socket = {"type": "websocket", "path": path}
        sent, seen = through_guard(socket)
        assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 4401)] and not seen
        sent, seen = through_guard(socket | {"extensions": {"websocket.http.response": {}}})
        assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 401) and not seen
        sent, seen = through_guard(socket | {"headers": [(b"authorization", b"Bearer secret")]})
        assert not sent and seen["qserve.key"].name == seen["qserve.tenant"] != ""
