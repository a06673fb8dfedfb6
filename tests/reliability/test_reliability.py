"""The cases of reliability, small: that they work, and that what does not depend on a machine's speed holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.reliability import __main__ as command
from tests.reliability.bad_inputs import bad_inputs, slow_inputs
from tests.reliability.cases import CASES, Figure, Options
from tests.reliability.client import percentile

# Times and memory of so short a run on a busy machine say nothing.
TIMED = ("seconds to idle", "RSS growth", "p95", "p99", "goodput", "slowest", "light requests not", "server over")


def test_a_figure_passes_within_its_limits() -> None:
    assert Figure("told", 3.0).passed and Figure("a", 2.0, at_most=2.0).passed
    assert not Figure("a", 2.1, at_most=2.0).passed and not Figure("a", 0.8, at_least=0.9).passed
    assert not Figure("a", float("nan"), at_most=1.0).passed
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([], 99) == 0.0


def test_bad_inputs_have_names_of_their_own() -> None:
    names = [bad.name for bad in (*bad_inputs(), *slow_inputs(1))]
    assert len(set(names)) == len(names) > 80
    assert not {bad.body for bad in slow_inputs(1)} & {bad.body for bad in slow_inputs(2)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, tiny_model: Path) -> None:
    figures = CASES[case](Options(str(tiny_model), requests=100, seconds=3.0, concurrency=16))
    missed = [figure for figure in figures if not figure.passed and not figure.name.startswith(TIMED)]
    assert not missed


@pytest.mark.slow
def test_the_command_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["reliability", "--case", "sigterm", "--concurrency", "4", "--json", str(out)])
    assert command.main() == 0
    content = json.loads(out.read_text())
    assert content["passed"] and content["cases"]["sigterm"][0]["name"] == "streams that ended whole"
