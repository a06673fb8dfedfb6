"""``Stopwatch``: how long a call takes on a GPU whose caches hold none of what it reads.

Equal calls take turns, each with its own copy of what it reads: when a copy's turn comes, the others have pushed it out
of the caches. All turns are one CUDA graph, so the time is that of the GPU, not of launching.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

COLD_BYTES = 256 << 20
"""Bytes read by the other turns before one comes again: over four times the largest cache."""
LEAST_TURNS = 24
"""Turns in a graph: with fewer, the start of the graph itself would count."""
WARM_SECONDS = 0.01
"""Before anything is timed: a GPU that did nothing for a while has slower clocks."""
WAIT_CYCLES = 1_000_000
"""Half a millisecond in which the GPU waits while the graph is launched behind the first event."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Time:
    """``seconds`` of one call, the median. ``replayed``: measured in a graph; otherwise launched one by one, where the
    time of short calls includes their launch."""

    seconds: float
    replayed: bool


@dataclass(frozen=True)
class Stopwatch:
    """Measures on the current stream of ``device``. For interpreted kernels on a CPU, by its clock."""

    device: torch.device
    repeats: int = 5
    cold_bytes: int = COLD_BYTES
    least_turns: int = LEAST_TURNS

    def copies(self, nbytes: int) -> int:
        """How many calls that read ``nbytes`` each must take turns."""
        return max(2, -(-self.cold_bytes // nbytes))

    def time(self, calls: Sequence[Call]) -> Time:
        """The time of one of ``calls``, after a first round that compiles."""
        for call in calls:
            call()
        turns = [*calls] * -(-self.least_turns // len(calls))
        if self.device.type != "cuda":
            return Time(median(self._wall(turns) for _ in range(self.repeats)), False)
        torch.cuda.synchronize(self.device)
        replay = self._captured(turns)
        run = replay or (lambda: _run(turns))
        until = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < until:
            run()
            torch.cuda.synchronize(self.device)
        seconds = [self._elapsed(run) / len(turns) for _ in range(self.repeats)]
        return Time(median(seconds), replay is not None)

    def _captured(self, turns: Sequence[Call]) -> Call | None:
        """The turns as a graph, or None where one cannot be captured, for example because it waits for the GPU."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph):
                _run(turns)
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream set
            torch.cuda.synchronize(self.device)
            return None
        return graph.replay

    def _elapsed(self, run: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _wall(self, turns: Sequence[Call]) -> float:
        begin = time.perf_counter()
        _run(turns)
        return (time.perf_counter() - begin) / len(turns)


def _run(turns: Sequence[Call]) -> None:
    for turn in turns:
        turn()
