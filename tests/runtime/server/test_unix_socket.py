"""A server on a Unix socket: who may connect, what becomes of the file, and that the whole API answers there."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import httpx
import pytest

from qserve.checkpoint.errors import QServeError
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.server.unix_socket import UnixSocket


def test_the_api_answers_there_and_the_file_goes(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "qserve.sock"
    config = ServerConfig(model_name="fox", model_aliases=("dog",))
    with ServerHandle(engine, config=config, sock=UnixSocket(path)) as server:
        assert (server.url, server.host, server.port) == (f"unix:{path}", str(path), 0)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/ready").status_code == 200
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["fox", "dog"]
            for name in ("fox", "dog"):
                assert client.get(f"/v1/models/{name}").json()["id"] == name
                body = {"model": name, "prompt": "the", "max_tokens": 2, "stream": True}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
                assert '"model":"fox"' in answer.text.replace(" ", "")
            refused = client.post("/v1/completions", json={"model": "cat", "prompt": "the"})
            assert refused.status_code == 404 and "'fox' or 'dog'" in refused.json()["error"]["message"]
            schemas = client.get("/openapi.json").json()["components"]["schemas"]
            assert schemas["CompletionRequest"]["properties"]["model"] == {"enum": ["fox", "dog", None]}
        with pytest.raises(QServeError, match="a server listens there already"):
            UnixSocket(path)
    assert not path.exists()


def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "qserve.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # without its file, as by SIGKILL
    umask = os.umask(0)
    try:
        sock = UnixSocket(path)
        assert os.umask(0) == 0, "as before"
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    sock.close()
    sock.close()
    assert not path.exists()


def test_a_file_of_another_server_stays(tmp_path: Path) -> None:
    path = tmp_path / "qserve.sock"
    first = UnixSocket(path)
    path.unlink()
    second = UnixSocket(path)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_paths_that_cannot_be_had(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("weights")
    with pytest.raises(QServeError, match="it exists and is no socket"):
        UnixSocket(file)
    assert file.read_text() == "weights"
    with pytest.raises(QServeError, match="No such file"):
        UnixSocket(tmp_path / "none" / "qserve.sock")
    with pytest.raises(QServeError, match="too long"):
        UnixSocket(tmp_path / ("x" * 120))
