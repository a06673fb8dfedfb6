"""Gates: the values they accept on the command line, what they let pass, and how they report a failure."""

from __future__ import annotations

import dataclasses
import math

import pytest

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import GateFailed, UsageError
from qserve.evals.gate import Gate, GateReport, enforce, judge, quality_gates, ratio, table

CARD = QualityCard(
    base_name="base", base_sha256="0" * 64, data_name="text", data_sha256="1" * 64, tokens=100, window=10,
    perplexity_base=10.0, perplexity=10.5, kl_mean=0.05, kl_median=0.04, kl_p90=0.1, top1_agreement=0.9,
    kernel_path="reference", created="2026-01-01",
)  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [("3%", 0.03), ("0.03", 0.03), ("0", 0.0), ("150%", 1.5), ("1e-3", 0.001)])
def test_ratio(text: str, value: float) -> None:
    assert ratio(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize("text", ["abc", "", "%", "3%%", "-1%", "nan", "inf", "nan%", "3 per cent"])
def test_what_is_no_ratio(text: str) -> None:
    with pytest.raises(UsageError, match="--x must be a number"):
        ratio(text, "--x")


def test_quality_gates() -> None:
    assert quality_gates() == []
    gates = quality_gates(max_kl=0.1, max_ppl_increase="6%", min_top1="90%")
    assert gates == [
        Gate("kl_mean", 0.1, "at_most"),
        Gate("perplexity_increase", 0.06, "at_most"),
        Gate("top1_agreement", 0.9, "at_least"),
    ]
    assert all(report.passed and report.missed_by == 0 for report in judge(gates, CARD))
    with pytest.raises(UsageError, match="150%"):
        quality_gates(min_top1="150%")
    for value in (-0.1, math.nan):
        with pytest.raises(UsageError, match="--max-kl"):
            quality_gates(max_kl=value)


def test_the_limit_itself_passes_and_beyond_it_fails() -> None:
    at = judge([Gate("kl_mean", 0.05, "at_most"), Gate("top1_agreement", 0.9, "at_least")], CARD)
    assert [report.passed for report in at] == [True, True]
    beyond = judge([Gate("kl_mean", 0.0499, "at_most"), Gate("top1_agreement", 0.95, "at_least")], CARD)
    assert [report.passed for report in beyond] == [False, False]
    assert [report.missed_by for report in beyond] == pytest.approx([0.0001, 0.05])
    assert beyond[0].samples == 100 and beyond[0].environment == "reference"
    assert judge([Gate("perplexity_increase", 1, "at_most")], CARD)[0].baseline == 10.0


def test_the_unfavourable_end_of_the_interval_is_judged() -> None:
    intervals = {"kl_mean": (0.04, 0.07), "top1_agreement": (0.88, 0.93)}
    card = dataclasses.replace(CARD, intervals=intervals)
    reports = judge(quality_gates(max_kl=0.06, min_top1="89%"), card)
    assert [report.passed for report in reports] == [False, False]
    assert [report.bound for report in reports] == [0.07, 0.88]
    assert [report.missed_by for report in reports] == pytest.approx([0.01, 0.01])
    assert "FAILED by 0.01" in table(reports)[1] and "0.0700" in table(reports)[1]
    assert all(report.passed for report in judge(quality_gates(max_kl=0.07, min_top1="88%"), card))
    assert [report.bound for report in judge(quality_gates(max_ppl_increase="6%"), card)] == [None]


@pytest.mark.parametrize("kind", ["at_most", "at_least"])
def test_nan_passes_no_gate(kind: str) -> None:
    card = dataclasses.replace(CARD)
    object.__setattr__(card, "kl_mean", math.nan)  # a card refuses NaN; a gate does not rely on that
    reports = judge([Gate("kl_mean", 1.0, kind)], card)  # type: ignore[arg-type]
    assert not reports[0].passed
    with pytest.raises(GateFailed):
        enforce(reports)


def test_the_table_says_which_failed_and_by_how_much() -> None:
    long = GateReport("output rate at 16 over transformers", 2.0, 8.0, "at_least", False, 3, "native", 10.0)
    reports = [*judge(quality_gates(max_kl=0.01, min_top1="50%"), CARD), long]
    header, kl, top1, rate = table(reports)
    assert header.split() == ["gate", "measured", "95", "%", "bound", "limit", "verdict"]
    assert kl.split() == ["kl_mean", "0.0500", "<=", "0.0100", "FAILED", "by", "0.04"]
    assert top1.endswith("passed")
    assert rate.startswith("output rate at 16 over transformers  ") and rate.endswith("FAILED by 6")
    assert len({row.index("  FAILED" if "FAILED" in row else "  passed") for row in (kl, top1, rate)}) == 1, "columns"
    with pytest.raises(GateFailed) as failed:
        enforce(reports)
    assert failed.value.exit_code == 3
    assert str(failed.value).splitlines() == [
        "gate failed: kl_mean, output rate at 16 over transformers", header, kl, top1, rate
    ]  # fmt: skip
    enforce([report for report in reports if report.passed])
