"""What the tests of the kernels share."""

from __future__ import annotations

import numpy as np
import pytest

from qserve.kernels.triton.target import is_interpreted


@pytest.fixture
def same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by numpy, whose sums depend on a row's place in a tile on some processors."""
    if is_interpreted():
        matmul = np.matmul
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype=np.float32: matmul(a, b, dtype=np.float64).astype(dtype))
