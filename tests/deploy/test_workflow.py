"""The GitHub workflow: valid by GitHub's schema, and nothing decided in it that ``.ci/run`` does not decide."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from qserve.cli import app

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
REPORTS = ROOT / ".ci/reports"


def test_it_is_valid_by_the_schema_of_github() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [["actionlint"], ["zizmor", "--offline", "--no-progress", "--min-severity", "high", "--config", "CONFIG"]],
    ids=lambda command: command[0],
)
def test_the_examiners_of_workflows_find_no_fault(command: list[str], tmp_path: Path) -> None:
    """One reads expressions, contexts and the shell; the other looks for what strangers could make it do."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    config = tmp_path / "zizmor.yml"
    # GitHub's own actions, by the version that GitHub moves.
    config.write_text("rules: {unpinned-uses: {config: {policies: {'actions/*': ref-pin}}}}\n", encoding="utf-8")
    command = [str(config) if each == "CONFIG" else each for each in command]
    done = subprocess.run([*command, str(WORKFLOW)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_starts_the_script_and_keeps_what_that_writes() -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands and not any("qserve" in command or "pip" in command for command in commands)
    assert any("GITHUB_STEP_SUMMARY" in command for command in commands)
    assert ".ci/reports" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    for path in (ROOT / ".ci/run", REPORTS):
        assert os.access(path, os.X_OK)
        assert subprocess.run([shutil.which("bash") or "bash", "-n", str(path)]).returncode == 0


def test_the_reports_are_made_by_commands_of_this_version() -> None:
    text = REPORTS.read_text(encoding="utf-8").replace("\\\n", " ")
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    used = re.findall(r"(?m)^ *qserve (\w+) (.*)$", text)
    assert [name for name, _ in used] == ["demo", "eval", "bench", "report", "report", "report"]
    for name, rest in used:
        options = {option for each in known[name].params for option in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"--[\w-]+", rest)) <= options, name
    gates = tomllib.loads((ROOT / ".ci/gates.toml").read_text(encoding="utf-8"))
    assert gates.keys() == {"kl_mean", "perplexity_increase", "top1_agreement"}
