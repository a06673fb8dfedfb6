"""The fastest configuration of a linear product on this GPU: all promising ones are timed.

Equal products, each with its own weight, take turns, so that the caches hold none of it (``Stopwatch``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from qserve.kernels.triton.eight_bit import EightBit
from qserve.kernels.triton.launch import compiling
from qserve.kernels.triton.target import target
from qserve.kernels.triton.tuning.configs import Config, bucket_of, resolve
from qserve.kernels.triton.tuning.stopwatch import Stopwatch
from qserve.kernels.triton.tuning.tuned import Measured
from qserve.kernels.triton.weight_only import WeightOnly

MOST_ROWS = 2048
"""The rows with which the last bucket is timed."""
NOISE = 0.01
"""A configuration counts as faster only by more than this share of the default's time."""
TOLERANCE = 2e-2
"""How far a row may be off that of the default, in the norm: another order of sums in 16 bits, no mistake."""
Tunable = WeightOnly | EightBit
REFUSALS = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)
"""Errors of a GPU that lacks the registers or the shared memory for a configuration."""
_FAILURES = (*REFUSALS, triton.CompilationError, RuntimeError)  # of a candidate; compiler passes raise RuntimeError


def rows_of(bucket: int, product: Tunable) -> int:
    """The number of rows with which a bucket is timed: its largest that may come."""
    return min(bucket, len(product.op.x), MOST_ROWS)


def weight_bytes(product: Tunable) -> int:
    """Bytes of its weight that one product must read."""
    if isinstance(product, WeightOnly):
        held = product.planes
        tensors = [held.words, held.scales, held.zeros, held.places]
    else:
        tensors = [product.weight, product.scales]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def candidates(product: Tunable, rows: int) -> list[Config]:
    """Configurations worth timing; the product's current one comes first."""
    swaps = (False, True) if isinstance(product, WeightOnly) and product.swaps else (False,)
    blocks = product.planes.blocks if isinstance(product, WeightOnly) else product.blocks
    gpu = target(product.op.x.device)
    tiles = [(16, n, w) for n, w in ((64, 4), (128, 4), (128, 8), (256, 8))] if rows <= 16 else []
    tiles += [(32, 64, 4), (32, 128, 4), (32, 128, 8), (32, 256, 8)] if 16 < rows <= 64 else []
    tiles += [(64, 64, 4), (64, 128, 4), (64, 128, 8), (64, 256, 8)] if rows > 32 else []
    tiles += [(128, 128, 4), (128, 128, 8), (128, 256, 8)] if rows > 64 else []
    found = [product.configs[bucket_of(rows)]]
    if len(swaps) == 2 and "wgmma" in gpu.features and rows > 16:
        # On an H200 the others never were the best, of 22 products that had all.
        swaps, tiles = (True,), [(m, n, warps) for m, n, warps in tiles if warps == 4 or m == 128]
    for m, n, warps in tiles:
        if product.padded_n % n:
            continue
        split = 1 if rows > 128 else resolve(Config(m, n, warps, 2), rows, product.padded_n, blocks, gpu.sms).splits
        for swap in swaps:
            if (swap and (rows <= 16 or n < 64)) or (len(swaps) == 2 and not swap and rows > 64):
                continue
            for stages in (2, 3, 4) if m >= 64 else (3, 4, 5):
                counts = {1} if rows > 128 else {split, max(1, split // 2), split * 2}
                found += [Config(m, n, warps, stages, swap, count) for count in sorted(counts)]
    if rows > 128:
        found += product.for_many()
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Tuner:
    """``threads`` compile for it; it ends at ``until``, on the clock of ``time.monotonic``."""

    watch: Stopwatch
    threads: int = 1
    until: float = math.inf

    def tune(self, products: Sequence[Tunable], bucket: int) -> Measured | None:
        """The best configuration of ``products``, which are equal, for the rows of ``bucket``; they have it from now
        on. If the time is over before every candidate had its turn: None, and the products are unchanged.

        Overwrites the inputs and the outputs of all.
        """
        first, rows = products[0], rows_of(bucket, products[0])
        default = first.configs[bucket]
        found = self._fastest(products, bucket, rows)
        configure(products, bucket, default if found is None else found.config)
        return found

    def _fastest(self, products: Sequence[Tunable], bucket: int, rows: int) -> Measured | None:
        choices = candidates(products[0], rows)
        want = _result(products[0], rows)  # of the default; also compiles what runs beside the product
        self._compile(products[0], bucket, rows, choices)
        times: dict[Config, float] = {}
        for config in choices:
            if time.monotonic() > self.until:
                return None
            configure(products, bucket, config)
            with suppress(*_FAILURES):
                if _is_near(_result(products[0], rows), want):
                    times[config] = self._seconds(products, rows)
        default = choices[0]
        best = min(times, key=lambda config: times[config], default=default)
        if default not in times:
            return None
        # The least of many times is low by luck, so both get another turn.
        took = {}
        for config in {default: None, best: None}:
            configure(products, bucket, config)
            took[config] = self._seconds(products, rows)
        if took[best] > took[default] * (1 - NOISE):
            best = default
        return Measured(best, round(took[best] * 1e6, 3), round(took[default] * 1e6, 3))

    def _seconds(self, products: Sequence[Tunable], rows: int) -> float:
        return self.watch.time([partial(product.run, rows) for product in products]).seconds

    def _compile(self, product: Tunable, bucket: int, rows: int, choices: Sequence[Config]) -> None:
        """Compile all at once; where kernels are interpreted there is nothing to compile."""
        if self.watch.device.type != "cuda":
            return
        with suppress(Exception), compiling(self.threads):  # what fails here is compiled when its turn comes
            for config in choices:
                product.configure({bucket: config})
                product.run(rows)


def configure(products: Sequence[Tunable], bucket: int, config: Config) -> None:
    for product in products:
        product.configure({bucket: config})


def _result(product: Tunable, rows: int) -> Tensor:
    """[rows, out] of the same random inputs every time; zeros where nothing was written."""
    generator = torch.Generator(product.op.x.device).manual_seed(0)
    product.op.x[:rows].normal_(generator=generator)
    product.op.out[:rows].zero_()
    if isinstance(product, EightBit):
        product.round(rows)  # even where another kernel rounds when a model runs
    product.run(rows)
    return product.op.out[:rows].float()


def _is_near(y: Tensor, want: Tensor) -> bool:
    """Compared row by row: among many rows, a wrong one would be lost in the norm of all."""
    return bool(((y - want).norm(dim=-1) <= TOLERANCE * want.norm(dim=-1)).all())
