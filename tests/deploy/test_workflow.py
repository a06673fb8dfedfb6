"""The GitHub workflows: valid by GitHub's schema, and they leave all decisions to the scripts of ``.ci/``."""

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
WORKFLOWS = ROOT / ".github/workflows"
WORKFLOW, RELEASE = WORKFLOWS / "ci.yml", WORKFLOWS / "release.yml"
REPORTS = ROOT / ".ci/reports"


def test_there_are_no_others() -> None:
    assert {*WORKFLOWS.iterdir()} == {WORKFLOW, RELEASE}


@pytest.mark.parametrize("workflow", [WORKFLOW, RELEASE], ids=lambda path: path.name)
def test_it_is_valid_by_the_schema_of_github(workflow: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", [WORKFLOW, RELEASE], ids=lambda path: path.name)
@pytest.mark.parametrize(
    "command",
    [["actionlint"], ["zizmor", "--offline", "--no-progress", "--min-severity", "high", "--config", "CONFIG"]],
    ids=lambda command: command[0],
)
def test_the_examiners_of_workflows_find_no_fault(command: list[str], workflow: Path, tmp_path: Path) -> None:
    """One reads expressions, contexts and the shell; the other looks for what strangers could make it do."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    config = tmp_path / "zizmor.yml"
    # GitHub's own actions, by the version that GitHub moves.
    config.write_text("rules: {unpinned-uses: {config: {policies: {'actions/*': ref-pin}}}}\n", encoding="utf-8")
    command = [str(config) if each == "CONFIG" else each for each in command]
    done = subprocess.run([*command, str(workflow)], capture_output=True, text=True)
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
    assert [name for name, _ in used] == ["demo", "eval", "demo", "eval", "bench", "report", "report", "report"]
    for name, rest in used:
        options = {option for each in known[name].params for option in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"--[\w-]+", rest)) <= options, name
    for file in ("gates.toml", "gates-gemma.toml"):
        gates = tomllib.loads((ROOT / ".ci" / file).read_text(encoding="utf-8"))
        assert gates.keys() == {"kl_mean", "perplexity_increase", "top1_agreement"}


def test_a_release_is_built_checked_and_attached_without_a_secret() -> None:
    text = RELEASE.read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs.keys() == {"wheels", "source", "release"}
    built = [step["run"] for step in jobs["wheels"]["steps"] if "run" in step]
    assert "cibuildwheel" in built[0] and built[1] == "python3 .ci/check_wheel.py dist/*.whl"
    assert jobs["release"]["needs"] == ["wheels", "source"] and "secrets." not in text
    assert [name for name, job in jobs.items() if "permissions" in job] == ["release"]  # all others only read
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    assert all(image.startswith("manylinux") for name, image in config.items() if name.endswith("-image"))
