"""The report of lm-eval's tasks, base and model side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Literal

from qserve.evals.gate import GateReport
from qserve.evals.report import Metric, Plot, Report, Section, Series
from qserve.evals.tasks import Compared, TaskResult, half_width


def side_by_side(base: Sequence[TaskResult], model: Sequence[TaskResult]) -> list[Compared]:
    known = {(each.task, each.metric): each for each in base}
    return [Compared(known.get((each.task, each.metric)), each) for each in model]


def metrics(found: Sequence[Compared]) -> list[Metric]:
    """``TASK/METRIC`` of the model, and with a base ``TASK/METRIC difference``."""
    result = []
    for each in found:
        model, name = each.model, f"{each.model.task}/{each.model.metric}"
        better: Literal["higher", "lower"] = "higher" if model.higher_is_better else "lower"
        paired = hashlib.sha256(f"{name} {len(model.documents)}".encode()).hexdigest()[:16]
        metric = Metric(name, model.value, "", better, samples=model.documents, pairing=paired)
        result.append(_ranged(metric, half_width(model)))
        if each.difference is not None:
            result.append(_ranged(Metric(f"{name} difference", each.difference, "", better), each.half_width))
    return result


def tasks_report(
    found: Sequence[Compared], name: str, base_name: str | None, command: str, gates: Sequence[GateReport] = ()
) -> Report:
    """Values with their 95 % intervals, and the paired difference where there is a base."""
    columns = (base_name, name, "difference") if base_name else (name,)
    header = ("task", "metric", "documents", *columns)
    rows = []
    for each in found:
        cells = [each.model.task, each.model.metric, str(len(each.model.documents) or "")]
        if each.base is not None:
            cells.append(_value(each.base))
        cells.append(_value(each.model))
        if each.difference is not None:
            half = each.half_width
            cells.append(f"{each.difference:+.4f}" + ("" if half is None else f" ± {half:.4f}"))
        rows.append(tuple(cells))
    title = "Figures with 95 % intervals" + ("; the difference is paired by document" if base_name else "")
    return Report(
        "tasks", f"Tasks of {name}", command, {"results": [asdict(each) for each in found]},
        (Section(title, header, tuple(rows)),), tuple(gates), metrics=tuple(metrics(found)),
        plots=(_plot(found, name, base_name),),
    )  # fmt: skip


def _plot(found: Sequence[Compared], name: str, base_name: str | None) -> Plot:
    series = [_series(name, [each.model for each in found])]
    if base_name:
        series.insert(0, _series(base_name, [each.base for each in found if each.base is not None]))
    ticks = tuple(f"{each.model.task}\n{each.model.metric}" for each in found)
    return Plot("Tasks", "With 95 % intervals.", "", "figure", tuple(series), "bar", ticks)


def _series(name: str, results: Sequence[TaskResult]) -> Series:
    values = tuple(each.value for each in results)
    halves = [half_width(each) or 0.0 for each in results]
    return Series(
        name, tuple(map(float, range(len(values)))), values,
        tuple(value - half for value, half in zip(values, halves)),
        tuple(value + half for value, half in zip(values, halves)),
    )  # fmt: skip


def _ranged(metric: Metric, half: float | None) -> Metric:
    if half is None:
        return metric
    return replace(metric, low=metric.value - half, high=metric.value + half)


def _value(result: TaskResult) -> str:
    half = half_width(result)
    return f"{result.value:.4f}" + ("" if half is None else f" ± {half:.4f}")
