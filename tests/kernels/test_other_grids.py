"""Kernels refuse a grid that they do not name, and the reference computes with it."""

from __future__ import annotations

import pytest
import torch

from qserve.checkpoint.grid import GRIDS, Grid
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import native, ops
from qserve.kernels.triton import linear, support

TABLE = torch.linspace(-1, 1, 16) ** 3
GPU = (9, 0)


@pytest.fixture
def weight(monkeypatch) -> QuantizedWeight:
    grid = Grid("cubes", (4,), zero_points=False, exact=False, largest=1.0, numbers=lambda codes: TABLE[codes.long()])
    monkeypatch.setitem(GRIDS, "cubes", grid)
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    return QuantizedWeight(WeightScheme(4, 32, dtype="cubes"), codes, torch.rand(32, 2) + 0.5)


def test_triton_kernels_refuse_it(weight):
    assert "cubes" in str(linear.supports(weight, GPU))
    for activations in (ActivationScheme("int8"), ActivationScheme("fp8")):
        rounded = QuantizedWeight(weight.scheme, weight.codes, weight.scales, activations=activations)
        assert "cubes" in str(linear.supports(rounded, GPU))
    assert "cubes" in str(support.unsupported(ops.Embed(weight, torch.empty(4, 64)), GPU, compiled=True))


@pytest.mark.skipif(native.missing() is not None, reason="no C library")
def test_c_kernels_refuse_it(weight):
    executor = native.NativeExecutor(1)
    assert "cubes" in str(executor.supports(ops.Embed(weight, torch.empty(4, 64))))
    product = ops.Linear(torch.ones(4, 64), weight, torch.empty(4, 32))
    assert "cubes" in str(executor.supports(product))
