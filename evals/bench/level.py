"""``Level``: one load of a sweep and the figures of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qserve.evals.bench.drive import Run
from qserve.evals.simulator.records import percentiles
from qserve.evals.slo import UNLIMITED, Slo

# The client counts as the limit if its one thread is busy for this share, or late with what is due by these seconds.
BUSY = 0.8
LATE = 0.010
# The objective is kept if at least this share of the requests keep it; failed ones count as broken.
KEPT = 0.95


@dataclass(frozen=True)
class Level:
    """``value``: users at once, or requests per second; ``run``: the result."""

    value: float
    run: Run
    slo: Slo = UNLIMITED

    @property
    def seconds(self) -> float:
        return self.run.records.seconds

    @property
    def rate(self) -> float:
        """Output tokens per second, from when the first request was due to the last token."""
        return sum(self.run.records.output) / self.seconds if self.seconds else 0.0

    @property
    def good_share(self) -> float:
        """The share of all ended requests that kept the objective."""
        total = len(self.run.records) + self.run.failed
        return self.run.records.good(self.slo) / total if total else 0.0

    @property
    def kept(self) -> bool:
        return self.good_share >= KEPT

    @property
    def late(self) -> float:
        """The 99th percentile, in seconds, of how late the client sent due requests; in a closed loop nothing is due.
        """
        return percentiles(self.run.records.queue()).get("p99", 0.0)

    @property
    def busy(self) -> float:
        """Share of a core that the client used."""
        elapsed = self.run.ended - self.run.began
        return self.run.cpu / elapsed if elapsed > 0 else 0.0

    @property
    def client_was_the_limit(self) -> bool:
        return self.busy > BUSY or self.late > LATE

    def latencies(self) -> dict[str, dict[str, float]]:
        """ttft, tpot, itl and e2e, each as mean and percentiles in seconds; without those that no request has."""
        records = self.run.records
        found = {"ttft": records.ttft(), "tpot": records.tpot(), "itl": self.run.gaps, "e2e": records.e2e()}
        return {name: percentiles(values) for name, values in found.items() if values}

    def figures(self) -> dict[str, float]:
        """One number for each question: requests, tokens and seconds."""
        run, seconds = self.run, self.seconds
        done = len(run.records)
        found = {
            "requests": float(done),
            "failed": float(run.failed),
            "seconds": seconds,
            "client_cpu_share": self.busy,
            "client_late_p99": self.late,
        }
        if done and seconds:
            found |= {
                "requests_per_second": done / seconds,
                "output_tokens_per_second": self.rate,
                "prompt_tokens_per_second": run.prompt_tokens / seconds,
                "prompt_tokens_mean": run.prompt_tokens / done,
                "output_tokens_mean": sum(run.records.output) / done,
                "cached_prompt_share": run.cached_tokens / run.prompt_tokens if run.prompt_tokens else 0.0,
                "goodput_per_second": run.records.good(self.slo) / seconds,
                "goodput_share": self.good_share,
                "client_cpu_per_token": run.cpu / sum(run.records.output),
            }
        return found

    def to_json(self) -> dict[str, object]:
        return {
            "load": self.value,
            "figures": self.figures(),
            "latency_seconds": self.latencies(),
            "failures": dict(self.run.failures),
            "reasons": dict(self.run.reasons),
            "planned": self.run.planned,
            "stopped": self.run.stopped,
            "tokens_counted_by_server": self.run.counted,
            "client_was_the_limit": self.client_was_the_limit,
        }


def ceiling(levels: Sequence[Level]) -> Level | None:
    """The highest load before the first one that breaks the objective; None where the lowest breaks it."""
    best = None
    for level in sorted(levels, key=lambda each: each.value):
        if not level.kept:
            break
        best = level
    return best
