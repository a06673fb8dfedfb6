"""The command line, in this process, and a text to calibrate and evaluate with."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qserve.cli import app


@pytest.fixture(scope="module", autouse=True)
def _plain_http(plain_http: None) -> None:
    """In every module of this folder."""


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
        loggers = [logging.getLogger(name) for name in (None, "qserve", "uvicorn")]
        handlers, levels = loggers[0].handlers[:], [logger.level for logger in loggers]
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        # qserve run sends its log to the standard error of this call, which is gone now.
        logging.captureWarnings(False)
        loggers[0].handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
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
