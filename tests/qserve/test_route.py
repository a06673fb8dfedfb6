"""``qserve route`` from the command line: what it refuses, and that it ends by a signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from qserve.cli import app


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["localhost:8000"], "a replica is http://HOST:PORT"),
        (["http://a:1", "http://a:1/"], "a replica is given twice"),
        (["http://a:1", "--routing", "random"], "choose from prefix-aware, least-loaded, round-robin"),
        (["http://a:1", "--health-interval", "0"], "must be 0.1..3600 seconds"),
        (["http://a:1", "--uds", "x", "--port", "1"], "--uds takes the place"),
        (["http://a:1", "--replica-key", "a\nb"], "must be printable"),
        (["http://a:1", "--tls-cert", "x"], "are given together"),
    ],
)
def test_bad_usage_is_one_line(options: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["route", *options])
    assert result.exit_code == 2 and why in result.output


def test_the_router_loads_nothing_that_computes() -> None:
    code = (
        "import sys, qserve.runtime.fleet.serve\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_signal_ends_it() -> None:
    command = [sys.executable, "-m", "qserve", "route", "http://127.0.0.1:9", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router:
        assert router.stderr is not None
        assert any("state=down" in line for line in router.stderr), "it does not say that the server is not there"
        router.send_signal(signal.SIGTERM)
        assert router.wait(30) == 0
