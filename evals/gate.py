"""``Gate``: a limit on a measured value, and what came of it. A failed gate ends a command with exit code 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import GateFailed, UsageError


@dataclass(frozen=True)
class Gate:
    """``value <= limit`` (at_most) or ``value >= limit`` (at_least)."""

    metric: str
    limit: float
    kind: Literal["at_most", "at_least"]


@dataclass(frozen=True)
class GateReport:
    """One gate held against one measurement. ``baseline`` is what the value is compared with, where there is one."""

    metric: str
    value: float
    limit: float
    kind: Literal["at_most", "at_least"]
    passed: bool
    samples: int
    environment: str
    baseline: float | None = None

    @property
    def missed_by(self) -> float:
        """How far beyond the limit, 0 where it passed."""
        if self.passed:
            return 0.0
        return abs(self.value - self.limit)


def quality_gates(
    *, max_kl: float | None = None, max_ppl_increase: str | None = None, min_top1: str | None = None
) -> list[Gate]:
    """Gates from command-line values; the latter two are numbers or percentages (``3%`` is 0.03).

    Raises ``UsageError`` for what is not a number.
    """
    gates = []
    if max_kl is not None:
        if not 0 <= max_kl < float("inf"):
            raise UsageError(f"--max-kl must be 0 or more, not {max_kl}")
        gates.append(Gate("kl_mean", max_kl, "at_most"))
    if max_ppl_increase is not None:
        rise = ratio(max_ppl_increase, "--max-ppl-increase")
        if rise > 1 and not max_ppl_increase.endswith("%"):
            raise UsageError(f"--max-ppl-increase {max_ppl_increase} is {rise:.0%}: write it as a percentage")
        gates.append(Gate("perplexity_increase", rise, "at_most"))
    if min_top1 is not None:
        limit = ratio(min_top1, "--min-top1")
        if limit > 1:
            raise UsageError(f"--min-top1 {min_top1} is above 100%: write it as 90% or 0.9")
        gates.append(Gate("top1_agreement", limit, "at_least"))
    return gates


def ratio(text: str, option: str) -> float:
    """``"3%"`` and ``"0.03"`` are both 0.03."""
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{option} must be a number such as 0.03 or a percentage such as 3%, not {text!r}")
    return value


def judge(gates: Iterable[Gate], card: QualityCard) -> list[GateReport]:
    """Hold a quality card against gates."""
    reports = []
    for gate in gates:
        value = float(getattr(card, gate.metric))
        # A NaN passes no gate.
        passed = value <= gate.limit if gate.kind == "at_most" else value >= gate.limit
        baseline = card.perplexity_base if gate.metric == "perplexity_increase" else None
        reports.append(
            GateReport(gate.metric, value, gate.limit, gate.kind, passed, card.tokens, card.kernel_path, baseline)
        )
    return reports


def table(reports: Sequence[GateReport]) -> list[str]:
    """Lines that say which gate failed, and by how much."""
    width = max([20, *(len(report.metric) for report in reports)]) + 2
    lines = [f"{'gate':<{width}}{'measured':>12}{'limit':>14}  verdict"]
    for report in reports:
        sign = "<=" if report.kind == "at_most" else ">="
        verdict = "passed" if report.passed else f"FAILED by {report.missed_by:.4g}"
        lines.append(f"{report.metric:<{width}}{report.value:>12.4f} {f'{sign} {report.limit:.4f}':>13}  {verdict}")
    return lines


def enforce(reports: Sequence[GateReport]) -> None:
    """Raise ``GateFailed``, with the table, where a gate failed."""
    failed = [report.metric for report in reports if not report.passed]
    if failed:
        raise GateFailed("\n".join([f"gate failed: {', '.join(failed)}", *table(reports)]))
