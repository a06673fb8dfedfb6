"""``qserve run`` as machines see it: a log of JSON lines, and bad options known before a model is loaded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

Cli = Callable[..., Any]


def test_every_line_is_json_from_loading_to_the_end(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "qserve", "run", str(tiny_model), "--port", "0", "--log-format", "json"]
    with subprocess.Popen([*command, "--kv-cache-memory", "8MiB"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[dict[str, Any]] = []
            for text in process.stderr:
                lines.append(json.loads(text))
                if lines[-1]["message"] == "ready":
                    url = f"http://{lines[-1]['address']}:{lines[-1]['port']}"
                    assert httpx.get(f"{url}/v1/models", headers={"X-Request-Id": "mine"}).status_code == 200
                    process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    told = [line["message"] for line in lines]
    assert [word for word in told if word in ("ready", "draining", "ended")] == ["ready", "draining", "ended"]
    assert told.index(f"loading {tiny_model.name}") < told.index("ready")
    (request,) = [line for line in lines if line["message"] == "request"]
    assert request["request_id"] == "mine"
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


@pytest.mark.parametrize(
    "options",
    [
        ("--log-format", "xml"),
        ("--log-level", "loud"),
        ("--otlp-endpoint", "collector:4318"),
    ],
)
def test_a_bad_option_is_refused(cli: Cli, tiny_model: Path, options: tuple[str, str]) -> None:
    cli("run", tiny_model, "--port", 0, *options).refused(2, options[0])
