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


@pytest.mark.slow
def test_every_line_is_json_from_loading_to_the_end(tiny_model: Path, tmp_path: Path) -> None:
    defaults = tmp_path / "defaults.json"
    defaults.write_text('{"top_k": 20}')
    command = [sys.executable, "-m", "qserve", "run", str(tiny_model), "--port", "0", "--log-format", "json"]
    command += ["--kv-cache-memory", "8MiB", "--generation-config", str(defaults)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
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
    assert f"sampling defaults of {defaults}: top_k 20; --generation-config vllm leaves them out" in told
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
