"""The report of needles in haystacks, by KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean

from qserve.evals.bootstrap import mean_interval
from qserve.evals.gate import GateReport
from qserve.evals.needle import Found
from qserve.evals.report import Metric, Plot, Report, Section, Series


def metrics(found: Sequence[Found]) -> list[Metric]:
    """For each KV cache the answer's log-likelihood, the gain from the needle and the share of exact answers; for
    caches after the first also the difference from it, needle by needle."""
    caches = _caches(found)
    first = _of(found, caches[0])
    pairing = " ".join(f"{each.length}/{each.depth:g}/{each.needle}" for each in first)
    result = []
    for cache in caches:
        own = _of(found, cache)
        values = [each.loglikelihood for each in own]
        result += [
            _metric(f"{cache}/loglikelihood", values, "nats", pairing),
            _metric(f"{cache}/gain", [each.gain for each in own], "nats", pairing),
            _metric(f"{cache}/exact", [float(each.exact) for each in own], "", pairing),
        ]
        if cache != caches[0]:
            difference = [value - other.loglikelihood for value, other in zip(values, first)]
            result.append(_metric(f"{cache}/difference", difference, "nats", pairing))
    return result


def needle_report(found: Sequence[Found], name: str, command: str, gates: Sequence[GateReport] = ()) -> Report:
    """A grid of depth and length for each cache, and the caches side by side."""
    caches, known = _caches(found), {each.name: each for each in metrics(found)}
    rows = []
    for cache in caches:
        keys = [f"{cache}/{key}" for key in ("loglikelihood", "gain", "exact", "difference")]
        rows.append((cache, *(_cell(known[key]) if key in known else "" for key in keys)))
    header = ("KV cache", "log-likelihood (nats)", "gained by the needle", "exact", f"difference from {caches[0]}")
    exact = fmean(float(each.exact) for each in found)
    remark = (
        "Greedy decoding gives hardly any number exactly: read the log-likelihoods."
        if exact < 0.1
        else "The exact answers are those of greedy decoding."
    )
    section = Section(f"The number that a needle says, with 95 % intervals. {remark}", header, tuple(rows))
    lengths = sorted({each.length for each in found})
    grids = [_grid(_of(found, cache), cache) for cache in caches]
    plots = (_lines(found, caches, lengths), *grids)
    return Report(
        "needle", f"Needles in the haystack of {name}", command, {"found": [asdict(each) for each in found]},
        (section, *(_by_depth(found, caches))), tuple(gates), metrics=tuple(known.values()), plots=plots,
    )  # fmt: skip


def _by_depth(found: Sequence[Found], caches: Sequence[str]) -> list[Section]:
    lengths = sorted({each.length for each in found})
    depths = sorted({each.depth for each in found})
    sections = []
    for cache in caches:
        own = _of(found, cache)
        rows = tuple(
            (f"{depth:.0%}", *(_both([e for e in own if e.depth == depth and e.length == n]) for n in lengths))
            for depth in depths
        )
        header = ("depth", *(f"{length:,} tokens" for length in lengths))
        sections.append(Section(f"KV cache {cache}: gain in nats, and exact answers", header, rows))
    return sections


def _both(cell: Sequence[Found]) -> str:
    return f"{fmean(each.gain for each in cell):+.2f}, {sum(each.exact for each in cell)} of {len(cell)}"


def _grid(own: Sequence[Found], cache: str) -> Plot:
    lengths = sorted({each.length for each in own})
    depths = sorted({each.depth for each in own})

    def mean(depth: float, length: int) -> float:
        return fmean(each.gain for each in own if each.depth == depth and each.length == length)

    series = tuple(
        Series(f"{depth:.0%}", tuple(map(float, range(len(lengths)))), tuple(mean(depth, each) for each in lengths))
        for depth in depths
    )
    return Plot(
        f"KV cache {cache}", "What the needle gains, in nats: log-likelihood of its number with it in the text, less "
        "that without it. Rows are depths, 0% is the beginning.",
        "tokens of the haystack", "gain (nats)", series, "grid", tuple(f"{length:,}" for length in lengths),
    )  # fmt: skip


def _lines(found: Sequence[Found], caches: Sequence[str], lengths: Sequence[int]) -> Plot:
    def series(name: str, own: Sequence[Found], value: Callable[[Found], float]) -> Series:
        cells = [[value(each) for each in own if each.length == length] for length in lengths]
        ranges = [mean_interval(cell) or (fmean(cell), fmean(cell)) for cell in cells]
        lows, highs = zip(*ranges)
        return Series(name, tuple(map(float, lengths)), tuple(map(fmean, cells)), tuple(lows), tuple(highs))

    lines = [series(f"KV {cache}", _of(found, cache), lambda each: each.loglikelihood) for cache in caches]
    control = series(f"KV {caches[0]}, no needle", _of(found, caches[0]), lambda each: each.without)
    return Plot(
        "Log-likelihood of the number", "Mean over depths and needles, with 95 % intervals; 0 is certain.",
        "tokens of the haystack", "log-likelihood (nats)", (*lines, control), log_x=True,
    )  # fmt: skip


def _caches(found: Sequence[Found]) -> list[str]:
    return list(dict.fromkeys(each.kv_cache_dtype for each in found))


def _of(found: Sequence[Found], cache: str) -> list[Found]:
    return [each for each in found if each.kv_cache_dtype == cache]


def _metric(name: str, samples: Sequence[float], unit: str, pairing: str) -> Metric:
    low, high = mean_interval(samples) or (None, None)
    return Metric(name, fmean(samples), unit, "higher", low, high, tuple(samples), pairing)


def _cell(metric: Metric) -> str:
    shown = "" if metric.low is None or metric.high is None else f" ({metric.low:.2f} to {metric.high:.2f})"
    return f"{metric.value:.2f}{shown}"
