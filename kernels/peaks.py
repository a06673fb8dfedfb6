"""The peak rates of this machine, measured: the roof that kernels are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from qserve.checkpoint import pages
from qserve.kernels import native
from qserve.kernels.threads import default_threads


@dataclass(frozen=True)
class Peaks:
    """The peak rates of this machine: ``products`` of bytes per second (None where it has no instruction whose rate a
    kernel could reach) and ``bytes`` read from memory per second."""

    products: float | None
    bytes: float


def measure(threads: int | None = None, isa: native.Isa | None = None, repeats: int = 5) -> Peaks:
    """The best of ``repeats`` tries of some hundredths of a second each, with all ``threads`` at once."""
    c, threads, level = native.library(), threads or default_threads(), native.ISAS.index(isa or native.best_isa())
    share = 128 << 20  # of each thread: far more than caches hold
    memory = pages.empty((threads, share), torch.uint8).fill_(1)

    def best(work: Callable[[int], int]) -> float:
        found = 0.0
        for _ in range(repeats):
            begin = time.perf_counter()
            done = sum(pool.map(work, range(threads)))
            found = max(found, done / (time.perf_counter() - begin))
        return found

    def read(thread: int) -> int:
        c.qs_peak_read(memory[thread].data_ptr(), share)
        return share

    with ThreadPoolExecutor(threads) as pool:
        products = best(lambda _: int(c.qs_peak_products(10_000_000, level)))
        return Peaks(products or None, best(read))
