"""A plugin of pytest for tests on a GPU that may be cut short: ``--seconds 100 --begun FILE``.

Every test has a turn before any has its second, with other parameters; what has not begun in time is skipped, so that
there is a summary whatever happens. A test that breaks the GPU's context ends the process, for all that follow would
fail: FILE names those that had their turn, and the next process leaves them out.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.kernels.triton.gpu_session import ENDED

BEGIN = time.monotonic()
BROKEN = 75
"""The exit code where a test broke the context."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=float("inf"), help="after which no test begins")
    parser.addoption("--begun", type=Path, help="a file of the tests that had their turn")


def _note(config: pytest.Config, line: str) -> None:
    if begun := config.getoption("--begun"):
        with begun.open("a") as stream:
            stream.write(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns: Counter[str] = Counter()
    turn = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        turn[item.nodeid] = turns[name]
        turns[name] += 1
    begun = config.getoption("--begun")
    had = set(begun.read_text().splitlines()) if begun and begun.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in had])
    items[:] = sorted((item for item in items if item.nodeid not in had), key=lambda item: turn[item.nodeid])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGIN > item.config.getoption("--seconds"):
        pytest.skip("no time was left")
    _note(item.config, f"{item.nodeid}\n")  # before it can break anything


def pytest_runtest_logfinish() -> None:
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # torch.AcceleratorError is one
            pytest.exit(f"the GPU's context is broken: {error}", BROKEN)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus != BROKEN:
        _note(session.config, ENDED)
