"""``Gate``: a limit on a measured value, and the verdict on it. A failed gate ends a command with exit code 3."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import GateFailed, UsageError


@dataclass(frozen=True)
class Gate:
    """``value <= limit`` (at_most) or ``value >= limit`` (at_least), for the unfavourable end of the value's 95 %
    interval where it has one."""

    metric: str
    limit: float
    kind: Literal["at_most", "at_least"]


@dataclass(frozen=True)
class GateReport:
    """One gate applied to one measurement. ``bound`` is the end of the value's 95 % interval that was judged, None
    where it has no interval; ``baseline`` is what the value is compared with, where there is such a thing."""

    metric: str
    value: float
    limit: float
    kind: Literal["at_most", "at_least"]
    passed: bool
    samples: int
    environment: str
    baseline: float | None = None
    bound: float | None = None

    @property
    def missed_by(self) -> float:
        """How far the value is beyond the limit; 0 where it passed."""
        if self.passed:
            return 0.0
        return abs((self.value if self.bound is None else self.bound) - self.limit)


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


def read_gates(path: Path) -> list[Gate]:
    """Gates of a TOML file: a table for each metric with ``max``, ``min`` or both, numbers or percentages as "3%".

    Raises ``UsageError`` for a file that says anything else.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--gate {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"--gate {path} is not TOML: {error}") from None
    gates = []
    for metric, limits in content.items():
        if not isinstance(limits, dict) or not limits or not limits.keys() <= {"max", "min"}:
            raise UsageError(f"--gate {path}: write [{metric}] with max = ... or min = ... below it, and nothing else")
        for key, limit in limits.items():
            kind: Literal["at_most", "at_least"] = "at_most" if key == "max" else "at_least"
            gates.append(Gate(metric, _limit(limit, f"--gate {path}: {key} of {metric}"), kind))
    if not gates:
        raise UsageError(f"--gate {path} holds no limits")
    return gates


def judge(gates: Iterable[Gate], card: QualityCard) -> list[GateReport]:
    """Apply gates to a quality card."""
    values = {gate.metric: float(getattr(card, gate.metric)) for gate in gates}
    baselines = {"perplexity_increase": card.perplexity_base}
    return judge_values(gates, values, card.tokens, card.kernel_path, baselines, card.intervals)


def judge_values(
    gates: Iterable[Gate],
    values: Mapping[str, float],
    samples: int,
    environment: str,
    baselines: Mapping[str, float] | None = None,
    intervals: Mapping[str, tuple[float, float]] | None = None,
) -> list[GateReport]:
    """Apply gates to figures, by name; ``intervals`` are the 95 % intervals of some of them. Raises ``UsageError``
    for a gate on a figure that was not measured."""
    reports = []
    for gate in gates:
        if gate.metric not in values:
            raise UsageError(f"no {gate.metric} is measured here, so it has no limit; there are {', '.join(values)}")
        value = values[gate.metric]
        interval = (intervals or {}).get(gate.metric)
        bound = None if interval is None else interval[1 if gate.kind == "at_most" else 0]
        judged = (value,) if bound is None else (value, bound)
        # A NaN passes no gate.
        passed = all(each <= gate.limit if gate.kind == "at_most" else each >= gate.limit for each in judged)
        baseline = (baselines or {}).get(gate.metric)
        reports.append(
            GateReport(gate.metric, value, gate.limit, gate.kind, passed, samples, environment, baseline, bound)
        )
    return reports


def _limit(value: object, where: str) -> float:
    """Unlike in ``ratio``, negative values are allowed: a log-likelihood is negative."""
    try:
        if isinstance(value, str) and value.endswith("%"):
            value = float(value[:-1]) / 100.0
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except ValueError:
        pass
    raise UsageError(f'{where} must be a number such as 0.03 or a percentage such as "3%", not {value!r}')


def table(reports: Sequence[GateReport]) -> list[str]:
    """Lines that say which gate failed, and by how much."""
    width = max([20, *(len(report.metric) for report in reports)]) + 2
    lines = [f"{'gate':<{width}}{'measured':>12}{'95 % bound':>12}{'limit':>14}  verdict"]
    for report in reports:
        sign = "<=" if report.kind == "at_most" else ">="
        verdict = "passed" if report.passed else f"FAILED by {report.missed_by:.4g}"
        bound = "" if report.bound is None else f"{report.bound:.4f}"
        lines.append(
            f"{report.metric:<{width}}{report.value:>12.4f}{bound:>12} {f'{sign} {report.limit:.4f}':>13}  {verdict}"
        )
    return lines


def enforce(reports: Sequence[GateReport]) -> None:
    """Raise ``GateFailed``, with the table, where a gate failed."""
    failed = [report.metric for report in reports if not report.passed]
    if failed:
        raise GateFailed("\n".join([f"gate failed: {', '.join(failed)}", *table(reports)]))
