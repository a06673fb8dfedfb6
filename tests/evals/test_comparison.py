"""Two reports, metric by metric: changes and noise."""

from __future__ import annotations

import random

import pytest

from qserve.checkpoint.errors import GateFailed, UsageError
from qserve.evals.comparison import Tolerance, changes, comparison_report, enforce_no_regression
from qserve.evals.report import Metric, Report


def a_report(*metrics: Metric, kind: str = "quality", machine: str = "x") -> Report:
    return Report(kind, "t", "c", {}, (), environment={"machine": machine}, metrics=metrics)


def verdict(before: Metric, after: Metric, tolerance: Tolerance | None = None) -> str:
    (found,) = changes(a_report(before), a_report(after), tolerance or Tolerance())
    return found.verdict


def test_without_an_interval_the_assumed_noise_decides() -> None:
    def rate(value: float) -> Metric:
        return Metric("rate", value, "tok/s", "higher")

    assert verdict(rate(100), rate(96)) == "same" and verdict(rate(100), rate(94)) == "worse"
    assert verdict(rate(100), rate(106)) == "better"
    assert verdict(rate(100), rate(96), Tolerance(noise=0.01)) == "worse"
    assert verdict(Metric("n", 100), Metric("n", 50)) == "changed"


def test_intervals_must_lie_apart_and_the_change_must_matter() -> None:
    def kl(value: float, half: float) -> Metric:
        return Metric("kl", value, "nats", "lower", value - half, value + half)

    assert verdict(kl(0.10, 0.01), kl(0.11, 0.01)) == "same"
    assert verdict(kl(0.10, 0.001), kl(0.11, 0.001)) == "worse"
    assert verdict(kl(0.10, 1e-6), kl(0.1005, 1e-6)) == "same", "half a percent is below the tolerance"
    assert verdict(kl(0.10, 1e-6), kl(0.1005, 1e-6), Tolerance(effect=0.0)) == "worse"


def test_pairs_see_what_intervals_hide_and_only_where_they_belong_together() -> None:
    draw = random.Random(1)
    before = [draw.gauss(0.1, 0.05) for _ in range(16)]
    after = [value * 1.05 + draw.gauss(0, 0.0005) for value in before]

    def kl(samples: list[float], pairing: str) -> Metric:
        mean = sum(samples) / len(samples)
        return Metric("kl", mean, "nats", "lower", mean - 0.03, mean + 0.03, tuple(samples), pairing)

    assert verdict(kl(before, "a"), kl(after, "a")) == "worse" and verdict(kl(after, "a"), kl(before, "a")) == "better"
    assert verdict(kl(before, "a"), kl(after, "b")) == verdict(kl(before, ""), kl(after, "")) == "same"
    assert verdict(kl(before, "a"), kl(before, "a")) == "same"
    assert verdict(kl(before[:2], "a"), kl(after[:2], "a")) == "same", "two pairs prove little"


def test_noise_alone_is_seldom_a_regression() -> None:
    draw = random.Random(2)
    wrong = 0
    for _ in range(300):
        old, new = ([draw.gauss(1, 0.2) for _ in range(8)] for _ in range(2))
        pair = [Metric("m", sum(each) / 8, "", "lower", samples=tuple(each), pairing="p") for each in (old, new)]
        wrong += verdict(*pair, Tolerance(effect=0.0)) != "same"
    assert wrong / 300 < 0.09, "5 % of honest differences lie outside a 95 % interval"


def test_the_report_names_what_is_worse_new_and_gone() -> None:
    first = a_report(Metric("a", 1.0, "s", "lower"), Metric("b", 1.0), Metric("c/d", 0.0, "", "higher"))
    second = a_report(Metric("a", 2.0, "s", "lower"), Metric("c/d", 1.0, "", "higher"), Metric("e", 3), machine="y")
    report = comparison_report([first, second], ["one", "two"], "qserve report")
    assert [row[-1] for row in report.sections[0].rows] == ["worse", "gone", "better", "new"]
    assert report.sections[0].rows[0][:4] == ("a", "1 s", "2 s", "+1 (+100.00%)")
    assert report.sections[-1].rows == (("machine", "x", "y"),)
    assert len(report.plots) == 1 and report.plots[0].ticks == ("a",)
    with pytest.raises(GateFailed, match=r"worse beyond noise: a$"):
        enforce_no_regression(report)
    enforce_no_regression(comparison_report([second, second], ["one", "two"], ""))
    with pytest.raises(GateFailed, match="a in two, a in three"):
        enforce_no_regression(comparison_report([first, second, second], ["one", "two", "three"], ""))


def test_what_does_not_compare() -> None:
    with pytest.raises(UsageError, match="quality and load"):
        changes(a_report(Metric("a", 1)), a_report(Metric("a", 1), kind="load"), Tolerance())
    with pytest.raises(UsageError, match="without metrics"):
        changes(a_report(), a_report(Metric("a", 1)), Tolerance())
