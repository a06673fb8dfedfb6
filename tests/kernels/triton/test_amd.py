"""The kernels for GPUs of AMD: compiled without one, never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton

from qserve.kernels.triton.target import described
from tests.kernels.triton import aot, delta_cases, engine_cases, latent_cases, linear_cases


@pytest.mark.slow
@pytest.mark.skipif("amd" not in triton.backends.backends, reason="this Triton has no compiler for AMD")
@pytest.mark.parametrize(
    "cases", [linear_cases, engine_cases, latent_cases, delta_cases], ids=lambda cases: cases.__name__
)
def test_every_kernel_compiles_for_amd(cases: Any) -> None:
    wanted = cases.amd_cases()
    made = aot.compile_file(Path(cases.__file__), "amd_cases")
    assert made.keys() == wanted.keys()
    for name, kernel in made.items():
        gpu = described(name.split()[-1])
        assert kernel.shared_bytes <= gpu.shared_bytes, f"{name}: {kernel.shared_bytes} bytes of shared memory"
        assert kernel.spills == 0, f"{name} spills {kernel.spills} registers"
        products = ("w4a16", " few", " many", " always", "tiles", "decodes", "product", "solve", "scores", "fold")
        multiplies = any(word in name for word in products)
        assert ("mfma" in kernel.ptx) == multiplies, f"{name}: the matrix unit"
