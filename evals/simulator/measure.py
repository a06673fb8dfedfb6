"""``serve``: the same traffic on the real engine, in real time; ``compare``: how close the simulation came.

Requests are submitted when they are due, whatever the engine is doing (open loop).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from qserve.evals.lengths import Lengths
from qserve.evals.report import Metric, Report, Section
from qserve.evals.simulator.cost import CostModel
from qserve.evals.simulator.fleet import Fleet, FleetConfig
from qserve.evals.simulator.recorder import recording
from qserve.evals.simulator.records import Records, percentiles
from qserve.evals.simulator.replica import ReplicaConfig
from qserve.evals.simulator.traffic import Arrival, Traffic
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

Clock = Callable[[], float]


@dataclass(frozen=True)
class Comparison:
    """One workload; ``errors`` are relative: simulated over measured, less one."""

    name: str
    requests: int
    measured: dict[str, float]
    simulated: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        return {key: self.simulated[key] / value - 1.0 for key, value in self.measured.items() if value}


def workloads(seconds_per_token: float, seconds: float, seed: int) -> dict[str, list[Arrival]]:
    """Three workloads that the fit has not seen, of about ``seconds`` each; an output token of a small batch takes
    ``seconds_per_token``.

    steady    Poisson, fixed lengths, half of what the engine can do
    bursty    12 requests at a time, lognormal lengths
    crowded   all at once
    """
    capacity = 1.0 / seconds_per_token  # output tokens per second
    output, count = 48, max(12, round(0.5 * capacity * seconds / 48))
    bursts = max(2, round(0.5 * capacity * seconds / (12 * 40)))
    crowd = max(16, round(0.9 * capacity * seconds / 64))
    half = 0.5 * capacity
    steady = Traffic(half / output, count, Lengths(96), Lengths(output), seed=seed)
    bursty = Traffic(
        half / 40, 12 * bursts, Lengths(80, 0.6), Lengths(32, 0.6), burst=12, max_model_len=512, seed=seed + 1
    )
    crowded = Traffic(1e6, crowd, Lengths(128, 0.4), Lengths(64, 0.4), max_model_len=512, seed=seed + 2)
    return {"steady": list(steady), "bursty": list(bursty), "crowded": list(crowded)}


def serve(
    engine: Engine, arrivals: Sequence[Arrival], text: Sequence[int], clock: Clock = time.perf_counter
) -> tuple[Records, int]:
    """Serve the traffic as it comes. Returns the records, and the most KV blocks in use at a time."""
    records, peak = Records(), 0
    draw = random.Random(0)
    prompts = [_prompt(draw, text, arrival) for arrival in arrivals]
    scheduled: dict[str, float] = {}
    first: dict[str, float] = {}
    salt = f"{clock()}"
    begin, due = clock(), 0
    with recording(engine) as recorder:
        while due < len(arrivals) or engine.has_work():
            now = clock() - begin
            while due < len(arrivals) and arrivals[due].time <= now:
                arrival = arrivals[due]
                params = SamplingParams(max_tokens=arrival.output, temperature=0.0, ignore_eos=True)
                engine.submit(str(due), prompts[due], params, cache_salt=f"{salt} {arrival.prefix}")
                due += 1
            if not engine.has_work():
                time.sleep(max(0.0, min(arrivals[due].time - now, 0.001)))
                continue
            start = clock() - begin
            outputs = engine.step()
            end = clock() - begin
            peak = max(peak, engine.scheduler.blocks.num_used)
            for sequence in plan.sequences if (plan := recorder.take()) else ():
                scheduled.setdefault(sequence.request_id.split("#")[0], start)
            for output in outputs:
                key = output.request_id
                first.setdefault(key, end)
                if output.finish_reason is not None:
                    arrival = arrivals[int(key)]
                    records.add(
                        int(key), arrival.time, scheduled[key], first[key], end, arrival.prompt, output.output_tokens
                    )
    return records, peak


def compare(engine: Engine, cost: CostModel, name: str, arrivals: list[Arrival], text: Sequence[int]) -> Comparison:
    """Serve a workload, simulate it, and compare the figures."""
    real, real_peak = serve(engine, arrivals, text)
    outcome = Fleet(FleetConfig(replica_of(engine)), cost).run(arrivals)
    found = [
        figures(records) | {"peak KV blocks": float(peak)}
        for records, peak in ((real, real_peak), (outcome.records, outcome.usages[0].peak_blocks))
    ]
    return Comparison(name, len(arrivals), *found)


def replica_of(engine: Engine) -> ReplicaConfig:
    """A replica with the same limits and the same pool."""
    return ReplicaConfig(
        engine.scheduler.config, engine.memory.num_blocks, BLOCK_SIZE, engine.config.enable_prefix_caching
    )


def comparison_report(found: Sequence[Comparison], title: str, command: str) -> Report:
    """One row for each workload, and the medians of the absolute errors at the end."""
    header = ("workload", "figure", "measured", "simulated", "error")
    rows = [
        (each.name, key, f"{each.measured[key]:.4g}", f"{each.simulated[key]:.4g}", f"{error:+.1%}")
        for each in found
        for key, error in each.errors.items()
    ]
    medians = {
        key: statistics.median(abs(each.errors[key]) for each in found if key in each.errors) for key in found[0].errors
    }
    rows += [("median", key, "", "", f"{value:.1%}") for key, value in medians.items()]
    data = {"workloads": [{**asdict(each), "errors": each.errors} for each in found], "median_errors": medians}
    metrics = tuple(Metric(f"median_error/{key}", value, "", "lower") for key, value in medians.items())
    section = Section("measured and simulated", header, tuple(rows))
    return Report("simulation", title, command, data, (section,), metrics=metrics)


def figures(records: Records) -> dict[str, float]:
    """What is compared, of requests that were served or simulated."""
    ttft, tpot = percentiles(records.ttft()), percentiles(records.tpot())
    found = {
        "output tokens/s": sum(records.output) / records.seconds,
        "TTFT mean, s": ttft["mean"],
        "TTFT p95, s": ttft["p95"],
    }
    return found | ({"TPOT mean, s": tpot["mean"]} if tpot else {})


def _prompt(draw: random.Random, text: Sequence[int], arrival: Arrival) -> list[int]:
    """Ordinary text, different for each draw."""
    start = draw.randrange(len(text))
    shared = 97 * arrival.prefix % len(text)
    circle = [*text, *text]
    own = arrival.prompt - arrival.prefix_tokens
    return circle[shared : shared + arrival.prefix_tokens] + circle[start : start + own]
