"""The manifests fit the schemas of Kubernetes, and the queries of dashboard and alerts are PromQL."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

VARIABLE = "QSERVE_JUDGES"
DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.judges
def test_kubernetes_and_prometheus_accept_what_is_in_deploy() -> None:
    python = Path(os.environ.get(VARIABLE, "")) / "deploy" / "bin" / "python"
    if not os.environ.get(VARIABLE) or not python.exists():
        pytest.skip(f"set {VARIABLE} to the DIR of tests/environments.py judges DIR deploy")
    script = Path(__file__).with_name("deploy_check.py")
    done = subprocess.run([python, script, DEPLOY], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
