"""The report of ``qserve bench kernels --device cuda``: tables, the figures that goals are set for, and the roofline.

It needs only times and no GPU: recorded times make the same report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import triton

from qserve.evals.bench.roofline import Roof
from qserve.evals.report import Metric, Plot, Report, Section, environment
from qserve.kernels.triton.target import Target

FEW = 16  # rows at which only reading the weight matters
LARGE = ("70B gate_up", "70B down")
SMALL = "8B"
LONG = 64 << 20  # bytes of keys and values: a step that reads fewer is over before memory is at its rate


@dataclass(frozen=True)
class Timing:
    """One contestant at one size: ``rows`` rows of a product of ``shape``, or ``rows`` sequences of ``context`` for the
    heads of ``shape``; ``context`` is 0 for a product. ``operations`` (floating-point) and ``bytes`` are for one call.
    """

    contestant: str
    scheme: str
    shape: str
    rows: int
    context: int
    seconds: float
    operations: int
    bytes: int
    ours: bool
    replayed: bool

    @property
    def name(self) -> str:
        return f"{self.contestant}, {self.scheme}"

    @property
    def rate(self) -> float:
        return self.operations / self.seconds

    @property
    def bandwidth(self) -> float:
        return self.bytes / self.seconds

    @property
    def size(self) -> tuple[str, int, int]:
        return self.shape, self.rows, self.context


def report(
    command: str, roof: Roof, gpu: Target, timings: Sequence[Timing], notes: Mapping[str, str],
    failures: Mapping[str, str],
) -> Report:  # fmt: skip
    """``notes``: what was not timed, and why; ``failures``: the same for our own, which make the report partial."""
    metrics = figures(roof, timings)
    linears = [t for t in timings if not t.context]
    sections = [
        Section(f"On {gpu.name}: copies {roof.bytes / 1e12:.2f} TB/s, large products "
                f"{(roof.operations or 0) / 1e12:.0f} TFLOP/s", ("figure", "value"),
                tuple((m.name, f"{m.value:.0%}" if m.unit == "" else f"{m.value:.2f}{m.unit}") for m in metrics)),
        _attention(roof, [t for t in timings if t.context]),
    ]  # fmt: skip
    for shape in dict.fromkeys(t.shape for t in linears):
        own = [t for t in linears if t.shape == shape]
        sections += [
            _table(f"{shape}: microseconds by rows", own, _microseconds),
            _table(f"{shape}: TB/s, TFLOP/s by rows", own, _rates),
        ]
    untimed = {**failures, **notes}
    if untimed:
        sections.append(Section("Not timed", ("what", "why"), tuple(untimed.items())))
    data = {
        "gpu": asdict(gpu) | {"features": sorted(gpu.features)},
        "peak_operations": roof.operations,
        "peak_bytes": roof.bytes,
        "timings": [asdict(t) for t in timings],
        "not_timed": dict(notes),
        "failures": dict(failures),
        "partial": bool(failures),
        "stopped": "; ".join(f"{name}: {why}" for name, why in failures.items()),
    }
    versions = {"gpu": gpu.name, "cuda": torch.version.cuda or "none", "triton": triton.__version__}
    return Report(
        "gpu-kernels", "Kernels of a GPU beside others and beside the machine", command, data,
        tuple(section for section in sections if section.rows), environment=environment() | versions,
        metrics=tuple(metrics), plots=_plots(roof, timings),
    )  # fmt: skip


def figures(roof: Roof, timings: Sequence[Timing]) -> list[Metric]:
    """The figures that goals are set for, where their times are known. A quotient above 1 is in our favour."""
    found = []

    def add(name: str, value: float, unit: str = "") -> None:
        found.append(Metric(name, value, unit, "higher"))

    few = [t for t in timings if t.ours and t.scheme.startswith("W4") and t.shape in LARGE and t.rows <= FEW]
    if few:
        lowest = min(t.bandwidth for t in few)
        add(f"W4A16, {' and '.join(LARGE)}, up to {FEW} rows: least share of the copies' rate", lowest / roof.bytes)
    at: dict[tuple[object, ...], float] = {(t.contestant, t.scheme, *t.size): t.seconds for t in timings}
    for scheme in dict.fromkeys(t.scheme for t in timings if t.ours and not t.context and t.scheme != "bf16"):
        for rows in sorted({t.rows for t in timings if not t.context}):
            own = {t.size: t.seconds for t in timings
                   if t.ours and t.scheme == scheme and t.rows == rows and t.shape.startswith(SMALL)}  # fmt: skip
            dense = [at.get(("cuBLAS", "bf16", *size)) for size in own]
            if own and None not in dense:
                total = sum(seconds for seconds in dense if seconds is not None)
                add(f"{scheme}, all {SMALL} products, {rows} rows: against cuBLAS", total / sum(own.values()), "x")
    others = [t for t in timings if not t.ours and t.contestant != "cuBLAS"]
    for name, scheme in dict.fromkeys((t.contestant, t.scheme) for t in others):
        ratios = [t.seconds / ours for t in others
                  if t.name == f"{name}, {scheme}" and (ours := at.get(("qserve", scheme, *t.size)))]  # fmt: skip
        if ratios:
            add(f"{scheme} against {name}: geometric mean", geometric_mean(ratios), "x")
            add(f"{scheme} against {name}: worst", min(ratios), "x")
    coded = [t for t in timings if t.ours and t.context and t.scheme.startswith("fp8")]
    if coded:
        if long := [t.bandwidth for t in coded if t.bytes >= LONG]:
            add(f"fp8 decode, over {LONG >> 20} MiB or more: least share of the copies' rate", min(long) / roof.bytes)
        ratios = [plain / t.seconds for t in coded if (plain := at.get(("qserve", "16-bit cache", *t.size)))]
        if ratios:
            add("fp8 decode against our 16-bit cache: geometric mean", geometric_mean(ratios), "x")
    return found


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _microseconds(timing: Timing) -> str:
    """The time, with a mark where the call was launched by itself: that of a short one then includes its launch."""
    return f"{timing.seconds * 1e6:.1f}" + ("" if timing.replayed else " eager")


def _rates(timing: Timing) -> str:
    return f"{timing.bandwidth / 1e12:.2f}, {timing.rate / 1e12:.0f}"


def _table(title: str, timings: Sequence[Timing], cell: Callable[[Timing], str]) -> Section:
    counts = sorted({t.rows for t in timings})
    found = {(t.name, t.rows): cell(t) for t in timings}
    names = dict.fromkeys(t.name for t in timings)
    rows = tuple((name, *(found.get((name, count), "") for count in counts)) for name in names)
    return Section(title, ("", *map(str, counts)), rows)


def _attention(roof: Roof, timings: Sequence[Timing]) -> Section:
    rows = tuple(
        (t.name, t.shape, f"{t.rows}", f"{t.context}", _microseconds(t),
         f"{t.bandwidth / 1e12:.2f}", f"{t.bandwidth / roof.bytes:.0%}", f"{t.rate / 1e12:.1f}")
        for t in timings
    )  # fmt: skip
    header = ("", "heads of", "sequences", "context", "us", "TB/s", "of the copies' rate", "TFLOP/s")
    return Section("Attention", header, rows)


def _plots(roof: Roof, timings: Sequence[Timing]) -> tuple[Plot, ...]:
    """The products of the largest weight, and attention with its heads."""
    linears = [t for t in timings if not t.context]
    if not linears:
        return ()
    largest = max(linears, key=lambda t: t.operations).shape
    shown = [t for t in linears if t.shape == largest] + [t for t in timings if t.context]
    series: dict[str, list[tuple[float, float]]] = {}
    for t in shown:
        series.setdefault(t.name, []).append((t.operations / t.bytes, t.rate))
    plot = roof.plot(
        series,
        f"Products of the weight {largest}, and attention. The roof is that of 16-bit products: those of 8 bits "
        "have one twice as high.",
        "operations per byte", "TFLOP/s", 1e12,
    )  # fmt: skip
    return (plot,)
