"""The kernels for GPUs of AMD: compiled without one, never run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import triton

from qserve.kernels.triton.target import AMD, described
from tests.kernels.triton import aot, delta_cases, engine_cases, latent_cases, linear_cases


@pytest.mark.slow
@pytest.mark.skipif("amd" not in triton.backends.backends, reason="this Triton has no compiler for AMD")
@pytest.mark.parametrize(
    "cases", [linear_cases, engine_cases, latent_cases, delta_cases], ids=lambda cases: cases.__name__
)
def test_every_kernel_compiles_for_amd(cases: Any, pytestconfig: pytest.Config) -> None:
    """For one of the two architectures where it is there for both, or for both with ``--everything``."""
    one_in = 1 if pytestconfig.getoption("--everything") else 2
    made = aot.compile_file(Path(cases.__file__), "amd_cases", one_in=one_in)
    kernels = Counter(name.rsplit(" ", 1)[0] for name in cases.amd_cases())
    assert {name for name, count in kernels.items() if count == len(AMD)} <= {name.rsplit(" ", 1)[0] for name in made}
    assert {name.split()[-1] for name in made} == set(AMD)
    for name, kernel in made.items():
        gpu = described(name.split()[-1])
        assert kernel.shared_bytes <= gpu.shared_bytes, f"{name}: {kernel.shared_bytes} bytes of shared memory"
        assert kernel.spills == 0, f"{name} spills {kernel.spills} registers"
        products = ("w4a16", " few", " many", " always", "tiles", "decodes", "product", "solve", "scores", "fold")
        multiplies = any(word in name for word in products)
        assert ("mfma" in kernel.ptx) == multiplies, f"{name}: the matrix unit"
