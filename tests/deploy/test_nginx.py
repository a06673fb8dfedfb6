"""The site of ``deploy/nginx`` in a real nginx before a real server: streams flow, ids pass, metrics stay inside."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle

SITE = Path(__file__).parents[2] / "deploy/nginx/qserve.conf"
HEADERS = {"Host": "llm.example.com"}

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None or shutil.which("openssl") is None, reason="nginx or openssl is not installed"
)


class Gate:
    """A runner that stops after some steps until it is let on."""

    def __init__(self, runner: Any, steps: int) -> None:
        self.runner, self.steps, self.open = runner, steps, False

    def run(self, *arguments: Any) -> Any:
        self.steps -= 1
        while self.steps < 0 and not self.open:
            time.sleep(0.005)
        return self.runner.run(*arguments)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerHandle]:
    config = EngineConfig(max_model_len=256, kv_cache_memory=8 << 20, threads=1)
    served = ServerConfig(allowed_hosts=(HEADERS["Host"],))
    with ServerHandle(Engine(str(tiny_model), config), config=served) as handle:
        yield handle


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def site(home: Path, port: int) -> Iterator[httpx.Client]:
    """nginx with the site as it is, but for its ports, its certificate and where the server is."""
    key, certificate = home / "site.key", home / "site.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=llm.example.com",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    plain, secure = free_port(), free_port()
    text = SITE.read_text(encoding="utf-8")
    for old, new in (
        ("/etc/nginx/tls/llm.example.com.pem", str(certificate)),
        ("/etc/nginx/tls/llm.example.com.key", str(key)),
        ("server 127.0.0.1:8000", f"server 127.0.0.1:{port}"),
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443 ssl", f"listen 127.0.0.1:{secure} ssl"),
    ):
        assert old in text
        text = text.replace(old, new)
    (home / "site.conf").write_text(re.sub(r"listen \[::\].*", "", text), encoding="utf-8")
    bodies = "".join(
        f"{name}_temp_path {home}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = (
        f"daemon off; pid {home}/pid; error_log {home}/error.log; events {{}} "
        f"http {{ access_log off; {bodies} include {home}/site.conf; }}"
    )
    (home / "nginx.conf").write_text(whole, encoding="utf-8")
    command = ["nginx", "-e", str(home / "error.log"), "-c", str(home / "nginx.conf")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    with (
        subprocess.Popen(command) as process,
        httpx.Client(base_url=f"https://127.0.0.1:{secure}", verify=False, headers=HEADERS, timeout=60) as client,
    ):
        try:
            end = time.monotonic() + 20
            while True:
                try:
                    moved = httpx.get(f"http://127.0.0.1:{plain}/v1/models", headers=HEADERS)
                    break
                except httpx.ConnectError:
                    assert process.poll() is None and time.monotonic() < end, (home / "error.log").read_text()
                    time.sleep(0.02)
            assert (moved.status_code, moved.headers["location"]) == (308, "https://llm.example.com/v1/models")
            yield client
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def front(server: ServerHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with site(tmp_path_factory.mktemp("nginx"), server.port) as client:
        assert client.get("/health").status_code == 200
        yield client


def test_tokens_come_while_the_rest_is_being_computed(front: httpx.Client, server: ServerHandle) -> None:
    engine = server.service.engine.host.engine
    gate = engine.runner = Gate(engine.runner, 3)  # type: ignore[assignment]
    body = {"prompt": "the", "max_tokens": 20, "ignore_eos": True, "stream": True, "logprobs": 0}
    try:
        with front.stream("POST", "/v1/completions", json=body) as response:
            events = (line for line in response.iter_lines() if line)
            first = [next(events) for _ in range(3)]  # a proxy that gathers would hold these, and wait here
            assert all("logprobs" in event for event in first)
            gate.open = True
            assert [*events][-1] == "data: [DONE]"
    finally:
        gate.open = True
        engine.runner = gate.runner


def test_ids_pass_and_metrics_do_not(front: httpx.Client) -> None:
    assert front.get("/v1/models", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert re.fullmatch("[0-9a-f]{32}", front.get("/v1/models").headers["x-request-id"])
    assert front.get("/metrics").status_code == 404


def test_what_nginx_answers_has_the_form_of_the_servers_errors(front: httpx.Client, tmp_path: Path) -> None:
    answer = front.post("/v1/completions", content=b"x" * (9 << 20))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    with site(tmp_path, free_port()) as alone:
        answer = alone.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "server_error")
    assert answer.headers["content-type"] == "application/json"


def test_no_redirect_leads_a_key_out_of_tls(front: httpx.Client) -> None:
    answer = front.post("/v1/completions/", json={})
    assert answer.status_code == 307 and answer.headers["location"].startswith("https://")


def test_a_websocket_goes_through(front: httpx.Client) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with connect(f"wss://127.0.0.1:{front.base_url.port}/v1/completions/ws", ssl=trusting, proxy=None) as socket:
        socket.send(json.dumps({"prompt": "the", "max_tokens": 12, "ignore_eos": True, "temperature": 0}))
        events = [json.loads(socket.recv(timeout=60))]
        while "choices" in events[-1]:
            events.append(json.loads(socket.recv(timeout=60)))
    assert len(events) > 3 and events[-1] == {"done": True}
