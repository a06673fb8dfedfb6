"""``simulation_report``: what a simulation found, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from qserve.checkpoint.errors import UsageError
from qserve.evals.report import Metric, Plot, Report, Section, Series
from qserve.evals.simulator.fleet import FleetConfig, Outcome
from qserve.evals.simulator.records import percentiles
from qserve.evals.slo import Slo

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2e": "whole request",
    "queue": "in the queue",
}
_SHARES = ("utilisation", "occupancy", "kv_peak", "kv_mean", "prefix_hit_rate", "goodput_share")


@dataclass(frozen=True)
class Price:
    """The price of one replica per hour, in any currency."""

    per_hour: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.per_hour < math.inf:
            raise UsageError(f"--price must be at least 0 per hour, not {self.per_hour}")


def figures(outcome: Outcome, config: FleetConfig, slo: Slo, price: Price) -> dict[str, float]:
    """One number for each question: seconds, tokens and shares. Only those that the traffic gives an answer to."""
    records, usages, seconds = outcome.records, outcome.usages, outcome.records.seconds
    alive = math.fsum((usage.died or 0.0) - usage.born for usage in usages)
    busy = math.fsum(usage.busy for usage in usages)
    queries = sum(usage.prefix_queries for usage in usages)
    good, output = records.good(slo), sum(records.output)
    cost = alive / 3600 * price.per_hour
    found = {
        "requests": float(len(records)),
        "rejected": float(records.rejected),
        "seconds": seconds,
        "steps": float(sum(usage.steps for usage in usages)),
        "preemptions": float(sum(usage.preemptions for usage in usages)),
        "replica_seconds": alive,
        "utilisation": busy / alive if alive else 0.0,
        "kv_peak": max((usage.peak_blocks for usage in usages), default=0) / config.replica.num_blocks,
    }
    if steps := sum(usage.steps for usage in usages):
        found["requests_per_step"] = sum(usage.rows for usage in usages) / steps
    if busy:
        places = config.replica.scheduler.max_num_seqs
        found["occupancy"] = math.fsum(usage.sequences for usage in usages) / busy / places
        found["kv_mean"] = math.fsum(usage.blocks for usage in usages) / busy / config.replica.num_blocks
    if queries:
        found["prefix_hit_rate"] = sum(usage.prefix_hits for usage in usages) / queries
    if seconds:
        found |= {
            "requests_per_second": len(records) / seconds,
            "prompt_tokens_per_second": sum(records.prompt) / seconds,
            "output_tokens_per_second": output / seconds,
            "goodput_per_second": good / seconds,
            "goodput_share": good / (len(records) + records.rejected),
        }
    if price.per_hour and output:
        found |= {"cost": cost, "cost_per_million_output_tokens": cost / output * 1e6}
    return found


def latencies(outcome: Outcome) -> dict[str, dict[str, float]]:
    """ttft, tpot, e2e and queue, each as mean and percentiles in seconds; without those that no request has."""
    records = outcome.records
    found = {"ttft": records.ttft(), "tpot": records.tpot(), "e2e": records.e2e(), "queue": records.queue()}
    return {name: percentiles(values) for name, values in found.items() if values}


def simulation_report(
    outcome: Outcome, config: FleetConfig, slo: Slo, price: Price, command: str, more: Mapping[str, object]
) -> Report:
    """``more``: further data, such as the traffic and the cost model."""
    found, times = figures(outcome, config, slo, price), latencies(outcome)
    header = ("", *next(iter(times.values()), {}))
    rows = tuple((_NAMES[name], *(_seconds(value) for value in values.values())) for name, values in times.items())
    facts = tuple((_label(name), _number(name, value)) for name, value in found.items())
    sections = [Section("Latency", header, rows)] if rows else []
    sections.append(Section("Service", ("", ""), facts))
    if len(outcome.scaling) > 1:
        changes = tuple((f"{time:.0f} s", str(count)) for time, count in outcome.scaling)
        sections.append(Section("Replicas that take requests", ("from", "replicas"), changes))
    data = {
        **more,
        "fleet": asdict(config),
        "slo": {name: value for name, value in asdict(slo).items() if value < math.inf},
        "figures": found,
        "latency_seconds": times,
        "scaling": outcome.scaling,
    }
    title = f"Simulation of {found['requests']:,.0f} requests on {len(outcome.usages)} replica" + "s" * (
        len(outcome.usages) > 1
    )
    return Report(
        "simulation", title, command, data, tuple(sections), metrics=_metrics(found, times), plots=_plots(times)
    )


def _metrics(found: Mapping[str, float], times: Mapping[str, Mapping[str, float]]) -> tuple[Metric, ...]:
    """The figures that say whether a fleet is better come first. A simulation has no noise for one seed."""
    latencies = [
        Metric(f"{name}_{key}", times[name][key], "s", "lower")
        for name in ("ttft", "tpot", "e2e")
        for key in ("mean", "p95")
        if key in times.get(name, {})
    ]
    higher = ("output_tokens_per_second", "goodput_per_second", "goodput_share", "utilisation", "prefix_hit_rate")
    lower = ("rejected", "preemptions", "cost", "cost_per_million_output_tokens")
    rates = [Metric(name, found[name], "", "higher") for name in higher if name in found]
    losses = [Metric(name, found[name], "", "lower") for name in lower if name in found]
    return (*rates[:3], *latencies, *rates[3:], *losses)


def _plots(times: Mapping[str, Mapping[str, float]]) -> tuple[Plot, ...]:
    if not times:
        return ()
    ticks = tuple(next(iter(times.values())))
    places = tuple(map(float, range(len(ticks))))
    series = tuple(Series(_NAMES[name], places, tuple(values.values())) for name, values in times.items())
    positive = all(value > 0 for each in series for value in each.y)
    return (Plot("Latency", "Over all requests.", "", "seconds", series, "line", ticks, log_y=positive),)


def _label(name: str) -> str:
    return name.replace("_", " ").replace("kv ", "KV blocks in use, ")


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _number(name: str, value: float) -> str:
    """Counts in full, shares in percent, all others with at least two decimals and three digits."""
    if name in _SHARES:
        return f"{value:.1%}"
    if value == int(value) and name != "requests_per_step":
        return f"{value:,.0f}"
    return f"{value:,.{max(2, 2 - math.floor(math.log10(value)))}f}"
