"""The kernels for GPUs of AMD: compiled without one, never run."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from qserve.kernels.triton.target import described
from tests.kernels.triton import aot, engine_cases, linear_cases

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif("amd" not in triton.backends.backends, reason="this Triton has no compiler for AMD")
@pytest.mark.parametrize("file", ["linear_cases.py", "engine_cases.py"])
def test_every_kernel_compiles_for_amd(file: str) -> None:
    wanted = (linear_cases if file == "linear_cases.py" else engine_cases).amd_cases()
    made = aot.compile_file(HERE / file, "amd_cases")
    assert made.keys() == wanted.keys()
    for name, kernel in made.items():
        gpu = described(name.split()[-1])
        assert kernel.shared_bytes <= gpu.shared_bytes, f"{name}: {kernel.shared_bytes} bytes of shared memory"
        assert kernel.spills == 0, f"{name} spills {kernel.spills} registers"
        multiplies = any(word in name for word in ("w4a16", " few", " many", "tiles", "decodes"))
        assert ("mfma" in kernel.ptx) == multiplies, f"{name}: the matrix unit"
