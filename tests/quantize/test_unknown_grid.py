"""Methods refuse a grid that they do not name."""

from __future__ import annotations

import pytest
import torch

from qserve.calibration.stats import LayerStats
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.grid import GRIDS, Grid
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize.methods import METHODS, Method
from qserve.quantize.schemes import word_values


@pytest.fixture
def scheme(monkeypatch) -> WeightScheme:
    grid = Grid("doubled", (4,), zero_points=False, exact=False, largest=1.0, numbers=lambda codes: 2.0 * codes)
    monkeypatch.setitem(GRIDS, "doubled", grid)
    return WeightScheme(4, 32, dtype="doubled")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_no_method_takes_a_grid_for_another(method: Method, scheme):
    stats = LayerStats(64)
    stats.update(torch.randn(200, 64))
    with pytest.raises(ValueError, match="doubled"):
        method.quantize(torch.randn(8, 64), stats, scheme, act_order=True, outputs=[])
    with pytest.raises(UsageError, match="doubled"):
        word_values(scheme)
