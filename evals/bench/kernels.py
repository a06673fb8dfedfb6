"""``qserve bench kernels``: how fast linear products run, beside the machine's peaks in the same run.

Weights are read from memory, as a model's are: enough copies to fill 200 MB take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.grid import TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import MXFP4, NVFP4, ActivationScheme, WeightScheme
from qserve.checkpoint.trellis import LANES, RING, PackedTrellis
from qserve.evals.bench.roofline import Roof
from qserve.evals.report import Metric, Plot, Report, Section
from qserve.kernels import native, peaks
from qserve.kernels.executor import Step
from qserve.kernels.ops import Linear
from qserve.kernels.prepack import tile_bytes

ROWS = (1, 8, 32, 256)
SHAPES = ((4096, 4096),)
ROTATED = 200 << 20  # bytes: more than caches hold
Update = Callable[[int, int], None]


@dataclass(frozen=True)
class Kernel:
    """A way to hold a weight and to round its input. Unless stated, integer products round it to int8 by 64 or 32."""

    name: str
    scheme: WeightScheme | None  # None for float16
    activations: ActivationScheme | None = None

    @property
    def of_integers(self) -> bool:
        """Whether bytes are multiplied, whose peak differs from that of floats."""
        return self.scheme is not None and self.scheme.grid.exact

    def bytes(self, out: int, inp: int) -> int:
        if self.scheme is None:
            return 2 * out * inp
        return tile_bytes(self.scheme, self.activations, out, inp, narrow_scales=True)

    def weight(self, out: int, inp: int) -> Tensor | QuantizedWeight:
        if self.scheme is None:
            return torch.ones(out, inp, dtype=torch.float16)
        scales = torch.full((out, self.scheme.groups(inp)), 2.0**-7)
        if self.scheme.grid is TRELLIS:
            tiles = -(-out // RING) * RING // LANES
            streams = torch.randint(0, 256, (tiles, inp, 2 * self.scheme.bits), dtype=torch.uint8)
            return QuantizedWeight(self.scheme, PackedTrellis(streams, self.scheme.bits, out), scales)
        codes = torch.randint(0, 1 << self.scheme.bits, (out, inp), dtype=torch.uint8)
        if self.scheme.grid.nan is not None:
            codes = codes & 0x77  # no NaN
        zeros = None if self.scheme.symmetric else torch.full_like(scales, 7.5)
        return QuantizedWeight(self.scheme, codes, scales, zeros, activations=self.activations)


KERNELS = (
    Kernel("W4 g64", WeightScheme(4, 64)),
    Kernel("W4 g32", WeightScheme(4, 32)),
    Kernel("MXFP4", MXFP4),
    Kernel("NVFP4", NVFP4),
    Kernel("NF4", WeightScheme(4, 64, dtype="nf4")),
    Kernel("HQQ 4 bit", WeightScheme(4, 64, symmetric=False, dtype="hqq")),
    Kernel("trellis 4 bit", WeightScheme(4, 64, dtype="trellis")),
    Kernel("trellis 3 bit", WeightScheme(3, 64, dtype="trellis")),
    Kernel("trellis 2 bit", WeightScheme(2, 64, dtype="trellis")),
    Kernel("W8 g64", WeightScheme(8, 64)),
    Kernel("W8A8", WeightScheme(8, -1), ActivationScheme("int8")),
    Kernel("fp8 W8A8", WeightScheme(8, -1, dtype="fp8"), ActivationScheme("fp8")),
    Kernel("float16", None),
)


@dataclass(frozen=True)
class Timing:
    """Medians. ``products``: multiply-adds per second, ``bytes`` of weights per second; ``intensity``: their quotient.
    """

    kernel: str
    shape: tuple[int, int]
    rows: int
    seconds: float
    products: float
    bytes: float
    of_integers: bool

    @property
    def intensity(self) -> float:
        return self.products / self.bytes


def _time(
    executor: native.NativeExecutor, kernel: Kernel, shape: tuple[int, int], repeats: int, rotated: int
) -> list[Timing]:
    out, inp = shape
    size = kernel.bytes(out, inp)
    copies = -(-rotated // size)
    x, y = torch.randn(max(ROWS), inp), torch.empty(max(ROWS), out)
    weight = kernel.weight(out, inp)
    program = executor.program(max(ROWS))
    program.add([Linear(x, weight, y) for _ in range(copies)])
    found = []
    for rows in ROWS:
        index = torch.arange(rows, dtype=torch.int32)
        ends = torch.tensor([0, rows], dtype=torch.int32)
        step = Step(index, index, index, ends, index[None], index)
        program.run(step)
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            program.run(step)
            seconds.append((time.perf_counter() - begin) / copies)
        median = statistics.median(seconds)
        products = rows * out * inp / median
        found.append(Timing(kernel.name, shape, rows, median, products, size / median, kernel.of_integers))
    return found


def run(
    executor: native.NativeExecutor,
    command: str,
    *,
    repeats: int = 5,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rotated: int = ROTATED,
    update: Update = lambda done, total: None,
) -> Report:
    """Time every kernel between two measurements of the machine; the better of the two is the roof."""
    before = peaks.measure(executor.threads, executor.isa)
    timings = []
    for index, kernel in enumerate(KERNELS):
        update(index, len(KERNELS))
        for shape in shapes:
            timings += _time(executor, kernel, shape, repeats, rotated)
    update(len(KERNELS), len(KERNELS))
    after = peaks.measure(executor.threads, executor.isa)
    best = max(before.products or 0.0, after.products or 0.0)
    peak = peaks.Peaks(best or None, max(before.bytes, after.bytes))
    return _report(executor, peak, timings, command)


def _report(executor: native.NativeExecutor, peak: peaks.Peaks, timings: list[Timing], command: str) -> Report:
    rows = []
    for t in timings:
        share = "" if peak.products is None or not t.of_integers else f"{t.products / peak.products:.0%}"
        rows.append((
            t.kernel, f"{t.shape[0]}x{t.shape[1]}", f"{t.rows}", f"{t.seconds * 1e6:.0f} us",
            f"{t.products / 1e9:.0f}", share, f"{t.bytes / 1e9:.1f}", f"{t.bytes / peak.bytes:.0%}",
        ))  # fmt: skip
    header = ("kernel", "weight", "rows", "time", "GMAC/s", "of the peak", "GB/s", "of memory's rate")
    integers = "" if peak.products is None else f"{peak.products / 1e9:.0f} GMAC/s of bytes in registers and "
    title = (
        f"{executor.isa} on {executor.threads} threads; at most {integers}{peak.bytes / 1e9:.1f} GB/s read from memory"
    )
    metrics = [
        Metric(f"{t.kernel}, {t.rows} rows", t.products / 1e9, "GMAC/s", "higher") for t in timings
    ]
    data = {
        "isa": executor.isa,
        "threads": executor.threads,
        "peak_products": peak.products,
        "peak_bytes": peak.bytes,
        "timings": [
            {"kernel": t.kernel, "shape": list(t.shape), "rows": t.rows, "seconds": t.seconds} for t in timings
        ],
    }
    return Report(
        "kernels", "Linear products beside the machine", command, data, (Section(title, header, tuple(rows)),),
        metrics=tuple(metrics), plots=(_roofline(peak, timings),),
    )  # fmt: skip


def _roofline(peak: peaks.Peaks, timings: list[Timing]) -> Plot:
    names = dict.fromkeys(t.kernel for t in timings)
    return Roof(peak.products, peak.bytes).plot(
        {name: [(t.intensity, t.products) for t in timings if t.kernel == name] for name in names},
        f"Rows: {', '.join(map(str, ROWS))}, from left to right. The roof is of bytes; floats have a lower one.",
        "multiply-adds per byte of weights", "GMAC/s", 1e9,
    )  # fmt: skip
