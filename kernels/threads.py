"""How many threads compute, and where. Torch's pool and ours share the same cores, so only one may work at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from qserve.checkpoint.errors import CapacityError

T = TypeVar("T")

# Of each thread, where none is held up.
_TURNS = 8


def default_threads() -> int:
    """The cores this process may run on, or as many as the quota of its control group pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() else cores


def usable_cpus() -> list[int] | None:
    """The CPUs that this thread may run on, or None where the system does not let a program choose."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None


def require_cpus(cpus: Sequence[int]) -> None:
    """Raise ``CapacityError`` where threads cannot be pinned to all of ``cpus``."""
    usable = usable_cpus()
    if usable is None:
        raise CapacityError("this system does not let a program choose its CPUs: leave out --cpu-list")
    missing = [cpu for cpu in cpus if cpu not in usable]
    if missing:
        here = cpu_ranges(usable)
        raise CapacityError(f"--cpu-list names CPU {missing[0]}, and this process may run on {here} alone")


def cpu_ranges(cpus: Sequence[int]) -> str:
    """``cpus`` in the form that ``--cpu-list`` takes: 0,2-3."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Limit torch to ``count`` threads. They spin between operations: they take the cores from ours, and where another
    process keeps a core busy, every small operation waits for the thread that was put aside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share(work: Callable[[int, int], T], count: int, threads: int | None = None) -> list[T]:
    """Run ``work(first, how many)`` in each thread, the caller included, on some of the remaining ``count`` pieces at a
    time: a core that others keep busy does fewer. For C kernels, whose calls release the interpreter's lock."""
    threads = max(1, min(threads or default_threads(), count))
    step = count if threads == 1 else max(1, count // (_TURNS * threads))
    starts = iter(range(0, count, step))

    def take() -> list[T]:
        return [work(first, min(step, count - first)) for first in starts]

    others = [_helpers(threads).submit(take) for _ in range(threads - 1)]
    return take() + [result for other in others for result in other.result()]


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads sleep when there is nothing to do."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="kernels")
