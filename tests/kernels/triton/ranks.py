"""Two ranks that share no buffers: this process and another one, each with Triton's interpreter, and gloo between."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from socket import socket
from typing import Any

import numpy as np
import torch

from qserve.kernels import process_group
from qserve.runtime.parallel.group import Exchange, RankGroup, SharedMemory
from qserve.runtime.parallel.shard import Shard

Run = Callable[..., tuple[Any, Any]]
"""``run(work, exchange, *args)`` calls ``work(group, *args)``, which must be importable, in both ranks."""


@contextmanager
def two_ranks() -> Iterator[Run]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _sum_alike) as pool:

        def run(work: Callable[..., Any], exchange: Exchange, *args: object) -> tuple[Any, Any]:
            memory, at = SharedMemory(), process_group.listen()
            shared = f"/proc/{os.getpid()}/fd/{memory.fd}"
            other = pool.submit(_follow, work, exchange, shared, at.getsockname()[1], *args)
            first = _rank(work, RankGroup(Shard(0, 2), memory, exchange=exchange), at, *args)
            memory.close()
            return first, other.result(60)

        yield run


def _sum_alike() -> None:
    """As the fixture ``same_sums`` in the first rank."""
    matmul = np.matmul
    np.matmul = lambda a, b, dtype=np.float32: matmul(a, b, dtype=np.float64).astype(dtype)  # type: ignore[assignment]


def _follow(work: Callable[..., Any], exchange: Exchange, memory: str, port: int, *args: object) -> Any:
    shared = SharedMemory(os.open(memory, os.O_RDWR))
    result = _rank(work, RankGroup(Shard(1, 2), shared, exchange=exchange), port, *args)
    shared.close()
    return result


def _rank(work: Callable[..., Any], group: RankGroup, at: socket | int, *args: object) -> Any:
    torch.set_num_threads(1)
    process_group.join(group.ranks, torch.device("cpu"), at)
    try:
        return work(group, *args)
    finally:
        group.leave()
