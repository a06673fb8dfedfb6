"""Two reports of the same kind, metric by metric: what became better or worse beyond noise.

Where both runs scored the same windows or documents, their differences are tested in pairs. That finds changes far
smaller than the widths of the two runs' intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from qserve.checkpoint.errors import GateFailed, UsageError
from qserve.evals.bootstrap import standard_error
from qserve.evals.report import Metric, Plot, Report, Section, Series

Verdict = Literal["better", "worse", "changed", "same", "gone", "new"]
_Z = 1.959964
# Student's t at 97.5 %, for 1 to 9 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Tolerance:
    """effect: smaller relative changes never count; noise: assumed for a metric that has no interval."""

    effect: float = 0.01
    noise: float = 0.05


@dataclass(frozen=True)
class Change:
    """The change of one metric. ``noise`` is half of the 95 % interval of the difference, None where a metric is
    missing; ``how`` it was found: paired, intervals or assumed."""

    name: str
    unit: str
    before: float | None
    after: float | None
    noise: float | None
    how: str
    verdict: Verdict


def changes(before: Report, after: Report, tolerance: Tolerance) -> list[Change]:
    """In the order of ``before``, new metrics at the end. Raises ``UsageError`` where the two cannot be compared."""
    if before.kind != after.kind:
        raise UsageError(f"reports of one kind compare; these are {before.kind} and {after.kind}")
    old, new = ({metric.name: metric for metric in report.metrics} for report in (before, after))
    if not old or not new:
        raise UsageError(f"a {before.kind} report without metrics compares with nothing: make it with this qserve")
    found = []
    for name, metric in old.items():
        gone = Change(name, metric.unit, metric.value, None, None, "", "gone")
        found.append(_change(metric, new[name], tolerance) if name in new else gone)
    added = [metric for name, metric in new.items() if name not in old]
    return found + [Change(metric.name, metric.unit, None, metric.value, None, "", "new") for metric in added]


def _change(before: Metric, after: Metric, tolerance: Tolerance) -> Change:
    noise, how = _noise(before, after, tolerance)
    difference = after.value - before.value
    verdict: Verdict = "same"
    if abs(difference) > max(noise, tolerance.effect * abs(before.value)):
        better = after.better or before.better
        verdict = "changed" if better is None else "better" if (difference > 0) == (better == "higher") else "worse"
    return Change(after.name, after.unit, before.value, after.value, noise, how, verdict)


def _noise(before: Metric, after: Metric, tolerance: Tolerance) -> tuple[float, str]:
    same_units = before.pairing and before.pairing == after.pairing
    if same_units and len(before.samples) == len(after.samples) >= 2:
        pairs = [new - old for new, old in zip(after.samples, before.samples)]
        mean, error = math.fsum(pairs) / len(pairs), standard_error(pairs)
        # Samples may be on another scale than the metric (a perplexity's are logarithms): their ratio is not.
        scale = abs((after.value - before.value) / mean) if mean else 0.0
        return _quantile(len(pairs) - 1) * error * scale, "paired"
    halves = [
        max(metric.high - metric.value, metric.value - metric.low)
        for metric in (before, after)
        if metric.low is not None and metric.high is not None
    ]
    if len(halves) == 2:
        return math.hypot(*halves), "intervals"
    return tolerance.noise * abs(before.value), "assumed"


def _quantile(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    # Cornish and Fisher's expansion around the normal quantile.
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def comparison_report(
    reports: Sequence[Report], names: Sequence[str], command: str, tolerance: Tolerance | None = None
) -> Report:
    """All reports against the first."""
    first, tolerance = reports[0], tolerance or Tolerance()
    compared = [(name, changes(first, other, tolerance)) for name, other in zip(names[1:], reports[1:])]
    header = ("metric", names[0], "run", "change", "95 % noise", "verdict")
    sections = [
        Section(f"{name} against {names[0]}", (*header[:2], name, *header[3:]), tuple(map(_row, found)))
        for name, found in compared
    ]
    facts = [key for key in first.environment if len({report.environment.get(key) for report in reports}) > 1]
    commands = tuple((name, report.command) for name, report in zip(names, reports))
    sections.append(Section("Runs", ("", "command"), commands))
    if facts:
        rows = tuple((key, *(report.environment.get(key, "") for report in reports)) for key in facts)
        sections.append(Section("What differs around them", ("", *names), rows))
    return Report(
        "comparison", f"{first.kind.capitalize()}: {' and '.join(names[1:])} against {names[0]}", command,
        {"kind": first.kind, "names": list(names), "tolerance": asdict(tolerance),
         "changes": {name: [asdict(change) for change in found] for name, found in compared}},
        tuple(sections), environment=reports[-1].environment, plots=_plots(compared),
    )  # fmt: skip


def regressions(report: Report) -> list[str]:
    """The metrics of a comparison that are worse, as ``metric in run``."""
    return [
        f"{change['name']} in {name}" if len(report.data["changes"]) > 1 else change["name"]
        for name, found in report.data["changes"].items()
        for change in found
        if change["verdict"] == "worse"
    ]


def enforce_no_regression(report: Report) -> None:
    """Raise ``GateFailed`` where a metric is worse beyond noise."""
    if worse := regressions(report):
        raise GateFailed(f"worse beyond noise: {', '.join(worse)}")


def _row(change: Change) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}" + (f" {change.unit}" if change.unit else "")

    moved, noise = "", ""
    if change.before is not None and change.after is not None and change.noise is not None:
        difference = change.after - change.before
        moved = f"{difference:+.4g}" + (f" ({difference / abs(change.before):+.2%})" if change.before else "")
        noise = f"± {change.noise:.2g} {change.how}"
    return (change.name, shown(change.before), shown(change.after), moved, noise, change.verdict)


def _plots(compared: Sequence[tuple[str, Sequence[Change]]]) -> tuple[Plot, ...]:
    """Relative changes with their noise; empty where no metric has a base other than 0."""
    shown = [change.name for change in compared[0][1] if change.before and change.noise is not None]
    if not shown:
        return ()
    series = []
    for name, found in compared:
        known = {change.name: change for change in found}
        values, halves = [], []
        for metric in shown:
            change = known[metric]
            base = abs(change.before or 1.0)
            values.append(100 * ((change.after or 0.0) - (change.before or 0.0)) / base)
            halves.append(100 * (change.noise or 0.0) / base)
        series.append(Series(
            name, tuple(map(float, range(len(shown)))), tuple(values),
            tuple(value - half for value, half in zip(values, halves)),
            tuple(value + half for value, half in zip(values, halves)),
        ))  # fmt: skip
    ticks = tuple(name.replace("_", "\n").replace("/", "\n") for name in shown)
    caption = "In percent of the first run, with the 95 % noise of the difference; which direction is good depends."
    return (Plot("Relative changes", caption, "", "change (%)", tuple(series), "bar", ticks),)
