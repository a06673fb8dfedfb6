"""TLS, browsers of other origins, and which doors are open."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.authentication import AuthenticationMiddleware
from qserve.runtime.server.limits.keys import KeyRing
from qserve.runtime.server.serve import ServerHandle, claim_socket

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
