"""Schemathesis finds no fault in the server's interface, over 500 requests, or 5,000 with ``--everything``; and none
in that of two servers behind a router, over 300."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "QSERVE_JUDGES"


@pytest.mark.judges
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("routed", [False, True], ids=["server", "router"])
def test_no_request_that_fits_or_breaks_the_document_is_a_5xx(pytestconfig: pytest.Config, routed: bool) -> None:
    home = os.environ.get(VARIABLE)
    if not home or not (Path(home) / "schemathesis" / "bin" / "st").exists():
        pytest.skip(f"set {VARIABLE} to the DIR of tests/environments.py judges DIR schemathesis")
    script = Path(__file__).with_name("schemathesis_run.py")
    few = ["--cases", "300", "--examples", "15"] if routed else ["--cases", "500", "--examples", "25"]
    sample = [] if pytestconfig.getoption("--everything") else few
    command = [sys.executable, script, Path(home) / "schemathesis", *sample, *["--routed"] * routed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
