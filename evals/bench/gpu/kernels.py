"""``qserve bench kernels --device cuda``: linear products and attention on a GPU, beside those of others and the
GPU's peaks in the same run.

Every contestant's result is checked before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qserve.checkpoint.errors import UsageError
from qserve.evals.bench.gpu import attention, linears
from qserve.evals.bench.gpu.attention import Heads
from qserve.evals.bench.gpu.peers import PEERS, SLOW_PEERS
from qserve.evals.bench.gpu.report import Timing, report
from qserve.evals.bench.gpu.shapes import SHAPES
from qserve.evals.bench.roofline import Roof
from qserve.evals.report import Report
from qserve.kernels.triton import target
from qserve.kernels.triton.tuning.stopwatch import Stopwatch

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
HEADS = {"8B": Heads(32, 8, 128), "70B": Heads(64, 8, 128)}
"""The heads of Llama 3."""
DECODES = ((1, 1024), (1, 32768), (8, 8192), (32, 1024), (32, 8192), (128, 2048))
"""(sequences, context)"""
PROMPTS = ((1, 2048), (1, 8192), (4, 2048))
"""(sequences, tokens)"""
COPIED, SIDE = 1 << 30, 8192
LIMIT = 200.0
"""Seconds after which nothing new begins."""
TOLERANCE = 3e-2
"""The largest relative error of a result in bfloat16; a mistake is off by more than a tenth."""
Update = Callable[[int, int], None]


@dataclass(frozen=True)
class Sizes:
    """The sizes that are timed, and those for the peaks: bytes copied, and the side of a square product."""

    shapes: Mapping[str, tuple[int, int]]
    rows: Sequence[int]
    heads: Mapping[str, Heads]
    decodes: Sequence[tuple[int, int]]
    prompts: Sequence[tuple[int, int]]
    copied: int = COPIED
    side: int = SIDE


FULL = Sizes(SHAPES, ROWS, HEADS, DECODES, PROMPTS)


def require_gpu() -> torch.device:
    """The GPU of this machine. Raises ``UsageError`` where there is none on which the kernels run."""
    reason = "no GPU is visible" if not torch.cuda.is_available() else target.missing()
    if reason is not None:
        raise UsageError(f"--device cuda: {reason}")
    return torch.device("cuda", torch.cuda.current_device())


def peaks(watch: Stopwatch, dtype: torch.dtype, copied: int = COPIED, side: int = SIDE) -> Roof:
    """Floating-point operations per second of a large product in ``dtype``, and bytes read or written by a kernel that
    copies. (What copies for ``Tensor.copy_`` in a graph reached two thirds of the memory's rate on an H200.)"""
    source = torch.randint(0, 1 << 30, (copied // 4,), dtype=torch.int32, device=watch.device)
    into = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=watch.device).to(dtype) for _ in range(2))
    product, copy = watch.time([lambda: a @ b]), watch.time([lambda: torch.bitwise_not(source, out=into)])
    return Roof(2 * side**3 / product.seconds, 2 * copied / copy.seconds)


class _Timer:
    """Times contestants one by one, and notes why some cannot be timed."""

    def __init__(self, watch: Stopwatch, dtype: torch.dtype, until: float) -> None:
        self.watch, self.dtype, self.until = watch, dtype, until
        self.features = target.target(watch.device).features
        self.timings: list[Timing] = []
        self.notes: dict[str, str] = {}  # what was not timed
        self.failures: dict[str, str] = {}  # the same for our own kernels

    def run(
        self,
        contestant: linears.Contestant | attention.Contestant,
        what: str,
        times: Callable[[], list[Timing]],
    ) -> None:
        """Time a contestant. ``what`` describes the case in the notes."""
        reason = contestant.missing()
        if reason is None and contestant.needs is not None and contestant.needs not in self.features:
            reason = f"needs {target.NEEDED[contestant.needs]}"
        if reason is not None:
            self.notes[contestant.name] = reason
            return
        name = f"{contestant.name}, {what}"
        if self.is_late(name):
            return
        try:
            self.timings += times()
        except Exception as error:  # other packages may raise anything, and the rest is still to be timed
            line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            (self.failures if contestant.ours else self.notes)[name] = line
        if self.watch.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_late(self, *names: str) -> bool:
        """Whether the time is over; if so, these names are noted."""
        late = time.monotonic() > self.until
        self.notes |= dict.fromkeys(names, "no time was left") if late else {}
        return late

    def linear(self, contestant: linears.Contestant, shape: str, problem: linears.Problem,
               rows: Sequence[int]) -> list[Timing]:  # fmt: skip
        held = [contestant.hold(problem)]
        held += [contestant.hold(problem) for _ in range(self.watch.copies(held[0].nbytes) - 1)]
        (out, inp), item, found = problem.shape, problem.x.itemsize, []
        for count in rows:
            if self.is_late(f"{contestant.name}, {problem.scheme}, {shape}, {count} rows"):
                break
            _require(problem.error(held[0].run(count)))
            took = self.watch.time([partial(each.run, count) for each in held])
            moved = held[0].nbytes + count * (inp + out) * item
            found.append(Timing(contestant.name, problem.scheme, shape, count, 0, took.seconds, 2 * count * out * inp,
                                moved, contestant.ours, took.replayed))  # fmt: skip
        return found

    def attention(
        self, contestant: attention.Contestant, heads: str, problem: attention.Problem
    ) -> list[Timing]:
        calls: Sequence[Callable[[], Tensor]] = contestant.hold(problem)
        _require(problem.error(calls[0]()))
        took = self.watch.time(calls)
        scheme = "fp8 cache" if contestant.fp8 else "16-bit cache"
        scheme = f"prompts, {scheme}" if problem.new > 1 else scheme
        moved = problem.nbytes + 2 * problem.queries.nbytes
        return [Timing(contestant.name, scheme, heads, problem.batch, problem.context, took.seconds,
                       problem.operations, moved, contestant.ours, took.replayed)]  # fmt: skip


def _require(error: float) -> None:
    if not error < TOLERANCE:
        raise ArithmeticError(f"the result is off by {error:.2g}")


def run(
    command: str,
    watch: Stopwatch,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes = FULL,
    *,
    limit: float = LIMIT,
    update: Update = lambda done, total: None,
    save: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Time every contestant between two measurements of the machine; the better of the two is the roof.

    ``save`` gets what is known after each part, in case the run is ended before the last.
    """
    before = peaks(watch, dtype, sizes.copied, sizes.side)
    timer = _Timer(watch, dtype, time.monotonic() + limit)
    parts = [*_attention(timer, sizes), *_linears(timer, sizes)]
    for index, part in enumerate(parts):
        update(index, len(parts))
        part()
        save(report(command, before, target.target(watch.device), timer.timings, timer.notes, timer.failures))
    update(len(parts), len(parts))
    after = peaks(watch, dtype, sizes.copied, sizes.side)
    roof = Roof(max(before.operations or 0.0, after.operations or 0.0), max(before.bytes, after.bytes))
    return report(command, roof, target.target(watch.device), timer.timings, timer.notes, timer.failures)


def _attention(timer: _Timer, sizes: Sizes) -> Iterator[Callable[[], None]]:
    def part(name: str, heads: Heads, batch: int, context: int, new: int, fp8: bool) -> None:
        cache = torch.float8_e4m3fn if fp8 else timer.dtype
        what = f"{name}, {batch} {'prompts' if new > 1 else 'sequences'} of {context}"
        if (fp8 and "fp8" not in timer.features) or timer.is_late(f"attention over {cache}, {what}"):
            return
        copies = timer.watch.copies(attention.cache_bytes(heads, batch, context, cache))
        problem = attention.problem(heads, batch, context, new, copies, timer.watch.device, timer.dtype, cache)
        for each in attention.PROMPTS if new > 1 else attention.CONTESTANTS:
            if each.fp8 == fp8:
                timer.run(each, what, partial(timer.attention, each, name, problem))

    for name, heads in sizes.heads.items():
        for batch, context in sizes.decodes:
            for fp8 in (False, True):
                yield partial(part, name, heads, batch, context, 1, fp8)
        for batch, context in sizes.prompts:
            for fp8 in (False, True):
                yield partial(part, name, heads, batch, context, context, fp8)


def _linears(timer: _Timer, sizes: Sizes) -> Iterator[Callable[[], None]]:
    """First what is here, then the products of other packages, which may compile for minutes."""

    def part(contestants: Sequence[linears.Contestant], name: str, scheme: str) -> None:
        if timer.is_late(f"{scheme}, {name}: {', '.join(each.name for each in contestants)}"):
            return
        device = timer.watch.device
        problem = linears.problem(scheme, sizes.shapes[name], max(sizes.rows), device, timer.dtype)
        for each in contestants:
            timer.run(each, f"{scheme}, {name}", partial(timer.linear, each, name, problem, sizes.rows))

    for all_of in (linears.CONTESTANTS, PEERS, SLOW_PEERS):
        for name in sizes.shapes:
            for scheme in linears.SCHEMES:
                if own := [each for each in all_of if each.scheme == scheme]:
                    yield partial(part, own, name, scheme)
