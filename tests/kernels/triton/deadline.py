"""A plugin of pytest for tests on a GPU that may be cut short: ``--seconds 100``.

Every test has a turn before any has its second, with other parameters; what has not begun in time is skipped, so that
there is a summary whatever happens. A test that breaks the GPU's context ends its process, where all that follow would
fail; pytest-xdist counts it as failed and begins another process.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
import torch

BEGIN = time.monotonic()
BROKEN = 75
"""The exit code where a test broke the context."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=float("inf"), help="after which no test begins")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns: Counter[str] = Counter()
    turn = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        turn[item.nodeid] = turns[name]
        turns[name] += 1
    items.sort(key=lambda item: turn[item.nodeid])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGIN > item.config.getoption("--seconds"):
        pytest.skip("no time was left")


def pytest_runtest_logfinish() -> None:
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # torch.AcceleratorError is one
            print(f"the GPU's context is broken: {error}", flush=True)
            os._exit(BROKEN)
