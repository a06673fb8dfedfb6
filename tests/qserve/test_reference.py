"""CLI.md says what the commands say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from qserve.cli import app
from qserve.commands.recipes import RECIPES, recipes_for_help
from qserve.reference import reference

ROOT = Path(__file__).parents[2]


def test_cli_md_is_current() -> None:
    written = (ROOT / "CLI.md").read_text(encoding="utf-8")
    assert written == reference(), "CLI.md is out of date: renew it with `python -m qserve.reference > CLI.md`"


def test_the_document_says_which_options_are_for_what_as_the_help_does() -> None:
    document = (ROOT / "docs/quantization.md").read_text(encoding="utf-8")
    for row in RECIPES:
        assert "| " + " | ".join(row) + " |" in document
        assert row[0] in recipes_for_help()


def test_every_command_and_option_is_described() -> None:
    text = reference()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        if command.hidden:
            continue
        section = text.partition(f"\n## qserve {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for param in command.params:
            assert param.help, f"{name} {param.name} has no help"
            for flag in [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else [param.metavar]:
                assert f"`{flag}" in section, f"{name} {flag}"


@pytest.mark.parametrize("environment", [{"COLUMNS": "20"}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_the_terminal_does_not_matter(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qserve.reference"], env={**os.environ, **environment}, capture_output=True, check=True
    )
    assert done.stdout.decode() == reference()
