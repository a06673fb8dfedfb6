"""What the machine does at most is above what a kernel does."""

from __future__ import annotations

import time

import pytest
import torch

from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, peaks
from qserve.kernels.ops import Linear, Step

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there are no C kernels here")


def test_a_kernel_stays_below_the_roof() -> None:
    peak = peaks.measure(threads=1, repeats=3)
    assert peak.bytes > 1e8
    if native.best_isa() != "avx512":
        assert peak.products is None
        return
    out = inp = 512
    weight = PackedWeight(
        WeightScheme(4, 64), torch.randint(0, 16, (out, inp), dtype=torch.uint8), torch.ones(out, inp // 64)
    )
    x, y = torch.randn(64, inp), torch.empty(64, out)
    program = native.NativeExecutor(1).program(64)
    program.add([Linear(x, weight, y) for _ in range(10)])
    rows = torch.arange(64, dtype=torch.int32)
    step = Step(rows, rows, rows, torch.tensor([0, 64], dtype=torch.int32), rows[None], rows)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        program.run(step)
        seconds.append(time.perf_counter() - begin)
    assert peak.products is not None
    assert 10 * 64 * out * inp / min(seconds) < 1.3 * peak.products


def test_without_such_an_instruction_there_is_no_peak_of_products() -> None:
    assert peaks.measure(threads=1, isa="scalar", repeats=1).products is None
