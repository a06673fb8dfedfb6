"""How many threads compute. Torch's pool and ours share the same cores; only one of them may be at work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def default_threads() -> int:
    """The cores this process may run on, or as many as the quota of its control group pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() else cores


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch's threads spin between operations: they take the cores from ours, and where another process keeps a
    core busy every small operation waits for the thread that was put aside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
