"""A disk that is full under the log: lines are lost, and nothing else."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from qserve import console

FULL = Path("/dev/full")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Full(io.StringIO):
    """Writes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_cannot_be_told_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Full())
        console.note("the disk is full")
        console.error("the disk is full")
        with console.progress("copying") as update:
            update(1, 2)
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    console.note("there is room again")
    assert told.getvalue() == "there is room again\n"


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_server_whose_log_is_full_serves(tiny_model: Path, log_format: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--log-format", log_format, "--log-level", "debug", "--kv-cache-memory", "8MiB"]
    command = [sys.executable, "-m", "qserve", "run", str(tiny_model), *options]
    with FULL.open("w") as full, subprocess.Popen(command, stdout=full, stderr=full, env=dict(os.environ)) as process:
        try:
            end = time.monotonic() + 120
            while not _ready(url):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            for tokens, status in ((3, 200), (0, 400)):
                body = json.dumps({"prompt": "the", "max_tokens": tokens}).encode()
                request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
                assert _status(request) == status
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def _ready(url: str) -> bool:
    try:
        return _status(urllib.request.Request(f"{url}/ready")) == 200
    except OSError:
        return False


def _status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
