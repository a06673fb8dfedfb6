"""Load generators and acceptance suites that others wrote, for a moment each; their figures are printed (``-s``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.judges


def test_giraffe_accepts_the_server(environment, judge, served, tmp_path: Path) -> None:
    """Its checks of the interface; those of the answers' truth judge a model, not a server."""
    program = environment("giraffe") / "bin" / "giraffe"
    done = judge(
        [program, "run", "--url", served.url, "--model", served.name, "--checks", "access,serving,first_output",
         "--concurrency", "2", "--samples", "8", "--max-output-tokens", "16", "--first-output-ms", "60000",
         "--max-requests", "60", "--output", tmp_path / "run", "--output-format", "json"]
    )
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    checks = {check["id"]: check for check in report["checks"] if check["status"] != "skipped"}
    assert {name: check["status"] for name, check in checks.items()} == {
        "access": "pass", "serving": "pass", "first_output": "pass"
    }, [check["summary"] for check in checks.values()]
    assert done.returncode == 0, done.stderr[-2000:]
