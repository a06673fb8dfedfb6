"""The compiled kernels without a GPU: their tests, run by the emulator.

A process either interprets or compiles, so they run in one of their own. Here bfloat16, fp8 and the lines of assembly
are computed as a GPU would; the interpreter knows none of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qserve.kernels.triton.target import is_interpreted

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not is_interpreted(), reason="there is a GPU, or this is such a process")
FEW = "bfloat16 and (every_scheme and (g128 or fp8) or 8-2-128 or True or 1100)"
"""In bfloat16 and fp8, which nothing else here computes."""
FEWER = {80: "bfloat16 and (g128 and (asymmetric or int8) or 8-2-128-300)", 89: "bfloat16 and (fp8 or 8-2-128-300)"}
"""Of those, what is compiled differently for an older GPU."""


def emulate(architecture: int, *arguments: str, timeout: float) -> int:
    """How many tests passed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "0", "-m", "", *arguments],
        env={**environment, "EMULATED_SM": str(architecture)}, cwd=HERE, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", [80, 89, 90])
def test_the_tests_of_the_kernels(architecture: int, pytestconfig: pytest.Config) -> None:
    """But for most of those for a GPU, which take a quarter of an hour: ``EMULATED_SM=90 pytest -m ""`` runs them.

    All on sm_90, whose kernels are the richest, and on the others some; ``--everything`` runs all there, too."""
    if architecture in FEWER and not pytestconfig.getoption("--everything"):
        some = ("test_gpu_linear.py", "test_gpu_engine.py", "-k", FEWER[architecture])
        assert emulate(architecture, *some, timeout=1700) >= 6
        return
    files = ["gpu_linear", "gpu_engine", "linear", "many_rows", "rounded_rows", "packed_bytes", "engine_kernels",
             "row_kernels", "expert_kernels"]
    chosen = ("-k", f"not test_gpu or {FEW}")
    assert emulate(architecture, *(f"test_{name}.py" for name in files), *chosen, timeout=1700) >= 200
