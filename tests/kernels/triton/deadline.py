"""A plugin of pytest for tests that may be cut short: ``-p deadline --seconds 100``.

Every test has a turn before any has its second, with other parameters; what has not begun in time is skipped, so that
there is a summary whatever happens. Each process of pytest-xdist counts from its own start.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

BEGIN = time.monotonic()


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
