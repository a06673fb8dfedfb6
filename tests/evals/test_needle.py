"""Needles: what is asked, with which cache, against the engine's own decoding; and the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from qserve.checkpoint.errors import DataError, UsageError
from qserve.checkpoint.source import open_model
from qserve.evals.needle import Found, Haystack, search
from qserve.evals.needle_report import metrics, needle_report

TEXT = list(range(40, 240)) * 2


def test_every_cell_sees_the_same_texts_with_every_cache(tiny_model: Path) -> None:
    steps: list[tuple[int, int]] = []
    haystack = Haystack((80, 160), (0.0, 1.0), 1)
    found = search(open_model(tiny_model), TEXT, haystack, ("fp32", "fp16", "fp32"), lambda *step: steps.append(step),
                   threads=1)  # fmt: skip
    assert steps[-1] == (18, 18) and len(found) == 12
    assert found[:4] == found[8:], "the same cache gives the same numbers"
    for exact, rounded in zip(found[:4], found[4:8]):
        assert (exact.length, exact.depth, exact.needle) == (rounded.length, rounded.depth, rounded.needle)
        assert exact.loglikelihood == pytest.approx(rounded.loglikelihood, abs=0.05) and not exact.exact
    assert found[0].without == found[1].without != found[2].without
    assert found[0].loglikelihood != found[1].loglikelihood, "the needle is somewhere else"


def test_what_cannot_be_searched(tiny_model: Path) -> None:
    source = open_model(tiny_model)
    with pytest.raises(DataError, match="500 tokens needs as much text"):
        search(source, TEXT, Haystack((500,)), ("fp16",))
    with pytest.raises(UsageError, match="at least 64"):
        Haystack((63,))
    with pytest.raises(UsageError, match="0 to 100"):
        Haystack(depths=(1.5,))
    with pytest.raises(UsageError, match="--needle-samples"):
        Haystack(needles=9)


def a_find(cache: str, length: int, depth: float, value: float, exact: bool = False) -> Found:
    return Found(cache, length, depth, 0, value, -20.0, exact)


FOUND = [
    a_find(cache, length, depth, -10.0 - length / 100 - lost, cache == "fp16")
    for cache, lost in (("fp16", 0.0), ("int8", 0.5))
    for length in (100, 200)
    for depth in (0.0, 1.0)
]


def test_the_report_compares_caches_needle_by_needle() -> None:
    known = {metric.name: metric for metric in metrics(FOUND)}
    assert known["fp16/loglikelihood"].value == -11.5 and known["int8/gain"].value == 8.0
    difference = known["int8/difference"]
    assert (difference.value, difference.low, difference.high) == (-0.5, -0.5, -0.5)
    assert known["fp16/exact"].value == 1.0 and "fp16/difference" not in known
    report = needle_report(FOUND, "m", "c")
    assert "exact answers are those of greedy decoding" in report.to_markdown()
    assert [plot.kind for plot in report.plots] == ["line", "grid", "grid"]
    assert report.plots[2].series[0].y == (8.5, 7.5)


def test_the_report_of_a_model_that_finds_nothing_says_so() -> None:
    report = needle_report([each for each in FOUND if not each.exact], "m", "c")
    assert "hardly any number exactly" in report.to_markdown()
