"""Helpers that the tests of the kernels share."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest

from qserve.kernels.triton import target
from qserve.kernels.triton.target import is_interpreted
from tests import interpreter

if architecture := os.environ.get("EMULATED_SM"):
    # Compiled for it, and executed by the emulator.
    if architecture not in ("80", "86", "89", "90"):
        pytest.exit(f"EMULATED_SM is one of 80, 86, 89 and 90, not {architecture}", returncode=4)
    from tests.ptx_emulator.driver import install

    target.DEFAULT = target.described(f"sm_{architecture}")
    install(target.capability(target.DEFAULT.architecture), target.DEFAULT.shared_bytes)
    target.missing = lambda: None
elif is_interpreted():
    interpreter.make_quick()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``EMULATED_ONE_IN``: of the tests with parameters, so many give one that runs, always the same one."""
    one_in = int(os.environ.get("EMULATED_ONE_IN", 1))
    left = [item for item in items if "[" in item.name and zlib.crc32(item.nodeid.encode()) % one_in]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


@pytest.fixture
def one_in(request: pytest.FixtureRequest) -> int:
    """Of how many configurations one is compiled: to compile all of them takes ten minutes of two cores."""
    return 1 if request.config.getoption("--everything") else 20


@pytest.fixture
def same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by numpy, whose sums depend on a row's place in a tile on some processors."""
    if is_interpreted():
        matmul = np.matmul
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype=np.float32: matmul(a, b, dtype=np.float64).astype(dtype))
