"""``qserve fleet`` where Ray is missing, and that nothing else needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qserve.cli import app
from tests.qserve.test_imports import FILES, ROOT, imports


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.checkpoint.extras.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["fleet", "--model", "out"])
    assert result.exit_code == 1
    assert "pip install 'qserve-llm[ray]'" in " ".join(result.output.split()) and "Traceback" not in result.output


def importing(module: str) -> set[str]:
    """The files that import it or a part of it."""
    return {
        str(path.relative_to(ROOT))
        for path in FILES
        for _, name in imports(path)
        if name == module or name.startswith(f"{module}.")
    }


@pytest.mark.slow
def test_one_file_imports_ray_and_one_command_imports_that_file() -> None:
    """So nothing else needs Ray, or loads it where it is installed."""
    assert importing("ray") == {"runtime/fleet/on_ray.py"}
    assert importing("qserve.runtime.fleet.on_ray") == {"qserve/commands/fleet.py"}
    code = "import sys, qserve.cli; print('qserve.runtime.fleet.on_ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_fleet_has_a_file_or_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("qserve.checkpoint.extras.find_spec", lambda name: object())
    for arguments in ([], [str(tmp_path / "f.toml"), "--model", "out"]):
        result = CliRunner().invoke(app, ["fleet", *arguments])
        assert result.exit_code == 2 and "either FILE.toml or --model" in " ".join(result.output.split())
