"""The command line, in this process, and a text to calibrate and evaluate with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qserve.cli import app


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> None:
        """Assert that the command failed with ``code`` and one line that holds ``words``; no traceback."""
        assert self.code == code, f"exit {self.code}\n{self.out}\n{self.err}"
        lines = re.findall(r"^error: .*$", self.err, re.MULTILINE | re.IGNORECASE)
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err + self.out
        for word in words:
            assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


@pytest.fixture
def cli() -> Callable[..., Outcome]:
    """``cli("eval", path, ...)`` runs a command; what is not an expected failure is raised here."""

    def run(*args: object) -> Outcome:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 900 tokens for the tiny tokenizer."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text("the quick brown fox and the lazy dog. " * 100, encoding="utf-8")
    return path
