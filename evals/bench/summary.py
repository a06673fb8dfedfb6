"""``bench_report``: the results of a load, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from qserve.evals.bench.level import Level, ceiling
from qserve.evals.report import Metric, Plot, Report, Section, Series
from qserve.evals.simulator.records import percentiles
from qserve.evals.slo import UNLIMITED, Slo

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token after it",
    "itl": "between two tokens",
    "e2e": "whole request",
}
_OVERVIEW = (
    "requests", "failed", "requests/s", "output tok/s", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "in the SLO",
)  # fmt: skip


def bench_report(
    levels: Sequence[Level], unit: str, title: str, command: str, more: Mapping[str, object], slo: Slo = UNLIMITED
) -> Report:
    """``unit``: of the levels, such as ``concurrent requests``; ``more``: further data, such as the workload."""
    limited = slo != UNLIMITED
    overview = Section(
        f"Load and what came of it{f', for {slo}' if limited else ''}",
        (unit, *(_OVERVIEW if limited else _OVERVIEW[:-1])),
        tuple(_overview(level, limited) for level in levels),
    )
    top = ceiling(levels) if limited and len(levels) > 1 else None
    sections = [overview, *_troubles(levels, unit)]
    if limited and len(levels) > 1:
        sections.insert(1, Section("Operating ceiling", ("", ""), _ceiling(levels, unit, slo)))
    sections += [section for level in levels if (section := _latency(level, unit, len(levels) > 1))]
    sections.append(_client(levels, unit))
    stopped = next((level.run.stopped for level in levels if level.run.stopped), None)
    data = {
        **more,
        "unit": unit,
        "slo": {name: value for name, value in asdict(slo).items() if value < math.inf},
        "levels": [level.to_json() for level in levels],
        "ceiling": None if top is None else top.value,
        "partial": stopped is not None,
        "stopped": stopped,
    }
    plots = _sweep(levels, unit, slo) if len(levels) > 1 else []
    return Report(
        "bench", title, command, data, tuple(sections), metrics=_metrics(levels, top), plots=(*plots, *_curves(levels))
    )


def _overview(level: Level, limited: bool) -> tuple[str, ...]:
    figures, times = level.figures(), level.latencies()
    cells = [f"{level.value:g}", f"{len(level.run.records)}", f"{level.run.failed}"]
    cells += [f"{figures.get('requests_per_second', 0):.2f}", f"{level.rate:.1f}"]
    cells += [_seconds(times.get(name, {}).get(rank)) for name in ("ttft", "tpot") for rank in ("p50", "p95")]
    return (*cells, f"{level.good_share:.0%}") if limited else tuple(cells)


def _ceiling(levels: Sequence[Level], unit: str, slo: Slo) -> tuple[tuple[str, str], ...]:
    top = ceiling(levels)
    broken = min((level.value for level in levels if not level.kept), default=None)
    if top is None:
        return ((f"{slo}", f"already broken by the lightest load, {levels[0].value:g} {unit}"),)
    found = [
        ("highest load that keeps the SLO", f"{top.value:g} {unit}"),
        ("output there", f"{top.rate:.1f} tok/s"),
        ("goodput there", f"{top.figures().get('goodput_per_second', 0.0):.2f} requests/s"),
    ]
    if broken is None:
        return (*found, ("broken by", "none of these loads: the ceiling lies higher"))
    return (*found, ("broken by", f"{broken:g} {unit}"))


def _latency(level: Level, unit: str, named: bool) -> Section | None:
    times = level.latencies()
    if not times:
        return None
    rows = tuple((_NAMES[name], *map(_seconds, values.values())) for name, values in times.items())
    return Section(f"Latency{f' at {level.value:g} {unit}' if named else ''}", ("", *next(iter(times.values()))), rows)


def _troubles(levels: Sequence[Level], unit: str) -> list[Section]:
    """What did not go as planned; empty where all did."""
    rows = []
    for level in levels:
        run, where = level.run, f"{level.value:g}"
        rows += [(where, kind, f"{times}", run.reasons[kind]) for kind, times in sorted(run.failures.items())]
        missing = run.planned - len(run.records) - run.failed
        if run.stopped or missing:
            why = run.stopped or "the session had failed before"
            rows.append((where, "partial", f"{missing} not sent or not awaited", why))
        if not run.counted:
            rows.append((where, "tokens", "not counted", "the server sends no usage: an event counts as a token"))
        if level.client_was_the_limit:
            rows.append((
                where, "client", f"{level.busy:.0%} of a core, {level.late * 1e3:.0f} ms late",
                "the client was the limit here, not the server: use a lighter load or a faster machine",
            ))  # fmt: skip
    return [Section("What did not go as planned", (unit, "", "", ""), tuple(rows))] if rows else []


def _client(levels: Sequence[Level], unit: str) -> Section:
    header = (unit, "CPU per output token", "of one core", "late, p99", "prompt tokens, mean", "output tokens, mean",
              "prompt tokens from a cache")  # fmt: skip
    rows = []
    for level in levels:
        found = level.figures()
        if "output_tokens_mean" in found:
            rows.append((
                f"{level.value:g}", f"{found['client_cpu_per_token'] * 1e6:.0f} µs", f"{level.busy:.1%}",
                f"{level.late * 1e3:.1f} ms", f"{found['prompt_tokens_mean']:.1f}",
                f"{found['output_tokens_mean']:.1f}", f"{found['cached_prompt_share']:.0%}",
            ))  # fmt: skip
    return Section("The client itself, and what it sent", header, tuple(rows))


def _metrics(levels: Sequence[Level], top: Level | None) -> tuple[Metric, ...]:
    found = []
    if top is not None:
        times = top.latencies()
        found += [
            Metric("load_at_the_ceiling", top.value, "", "higher"),
            Metric("output_at_the_ceiling", top.rate, "tok/s", "higher"),
            Metric("goodput_at_the_ceiling", top.figures()["goodput_per_second"], "requests/s", "higher"),
            *(
                Metric(f"{name}_p95_at_the_ceiling", times[name]["p95"] * 1e3, "ms", "lower")
                for name in ("ttft", "tpot") if name in times
            ),
        ]
    if len(levels) > 1:
        found.append(Metric("output_at_most", max(level.rate for level in levels), "tok/s", "higher"))
    for level in levels:
        if not len(level.run.records):
            continue
        at = f"/{level.value:g}" if len(levels) > 1 else ""
        records = level.run.records
        found.append(Metric(f"output{at}", level.rate, "tok/s", "higher"))
        for name, values in (("ttft", records.ttft()), ("tpot", records.tpot())):
            if values:
                found += [
                    _mean(f"{name}_mean{at}", [value * 1e3 for value in values]),
                    Metric(f"{name}_p95{at}", percentiles(values)["p95"] * 1e3, "ms", "lower"),
                ]
    return tuple(found)


def _mean(name: str, values: Sequence[float]) -> Metric:
    """The metric, with the normal 95 % interval of a mean where there is more than one value."""
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2:
        return Metric(name, mean, "ms", "lower")
    error = 1.96 * math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (count - 1) / count)
    return Metric(name, mean, "ms", "lower", mean - error, mean + error)


def _sweep(levels: Sequence[Level], unit: str, slo: Slo) -> list[Plot]:
    """Times at the left, rates at the right, and where the objective breaks."""
    shown = [level for level in levels if len(level.run.records)]
    x = tuple(level.value for level in shown)
    top = ceiling(levels)
    marks: tuple[tuple[float, str], ...] = ()
    verdict = ""
    if slo != UNLIMITED:
        verdict = f" Even the lightest load breaks {slo}."
        if top is not None:
            marks = ((top.value, f"ceiling: {top.value:g}"),)
            verdict = f" The ceiling is the highest load at which 95 % of the requests keep {slo}."
    output = Series("output tok/s", x, tuple(level.rate for level in shown), right=True)
    good = tuple(level.figures()["goodput_per_second"] for level in shown)
    goodput = output if slo == UNLIMITED else Series("goodput, requests/s", x, good, right=True)
    found = []
    for name, short, long, limit, right in (
        ("ttft", "TTFT", "time to first token", slo.ttft, output),
        ("tpot", "TPOT", "time per output token", slo.tpot, goodput),
    ):
        timed = [level for level in shown if name in level.latencies()]
        where = tuple(level.value for level in timed)
        series = [
            Series(f"{short} {rank}", where, tuple(level.latencies()[name][rank] * 1e3 for level in timed))
            for rank in ("p50", "p95")
        ]
        if limit < math.inf:
            series.append(Series(f"SLO of {short}", (x[0], x[-1]), (limit * 1e3, limit * 1e3)))
        found.append(Plot(
            f"{right.name.split(',')[0].replace('output tok/s', 'throughput').capitalize()} and {long}",
            f"{long.capitalize()} (left) and {right.name} (right) as the load grows.{verdict}",
            unit, f"{long} (ms)", (*series, right),
            y_right=right.name, log_x=x[-1] >= 8 * x[0], log_y=name == "ttft", marks=marks,
        ))  # fmt: skip
    return found


def _curves(levels: Sequence[Level]) -> list[Plot]:
    """The share of requests that had their first token within a time; one curve for each load."""
    found = []
    for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token")):
        series: list[Series] = []
        for level in levels:
            values = sorted(getattr(level.run.records, name)())
            if len(values) > 1:
                # Only as many points as a curve needs.
                ranks = sorted({round(step / 200 * (len(values) - 1)) for step in range(201)})
                shares = tuple((rank + 1) / len(values) * 100 for rank in ranks)
                series.append(Series(f"at {level.value:g}", tuple(values[rank] * 1e3 for rank in ranks), shares))
        if series:
            found.append(Plot(
                f"{title}, request by request",
                "How many requests had it within how long; one curve for each load, the further left the better.",
                "milliseconds", "requests (%)", tuple(series), log_x=min(each.x[0] for each in series) > 0,
            ))  # fmt: skip
    return found


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
