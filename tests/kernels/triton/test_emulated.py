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
FEW = "bfloat16 and (every_scheme and (g128 or fp8) or 8-2-128 or True or 1100 or test_gpu_delta or test_gpu_lora)"
"""In bfloat16 and fp8, which nothing else here computes."""
FEWER = {
    80: "bfloat16 and (g128 and (asymmetric or int8) or 8-2-128-300 or test_gpu_delta)",
    89: "bfloat16 and (fp8 or 8-2-128-300)",
}
"""Of those, what is compiled differently for an older GPU."""
PARTS = (
    ("gpu_linear", "linear", "many_rows", "rounded_rows", "trellis"),
    ("gpu_engine", "gpu_delta", "gpu_lora", "packed_bytes", "engine_kernels", "row_kernels", "expert_kernels"),
)


def emulate(architecture: int, *arguments: str, timeout: float, one_in: int = 1) -> int:
    """How many tests passed, of ``one_in`` tests with parameters one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"EMULATED_SM": str(architecture), "EMULATED_ONE_IN": str(one_in)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "0", "-m", "", *arguments],
        env=environment, cwd=HERE, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", FEWER)
def test_what_an_older_gpu_computes_differently(architecture: int, pytestconfig: pytest.Config) -> None:
    """``EMULATED_SM=80 pytest -m "" FILE`` runs the rest, and ``--everything`` as much as on sm_90."""
    if pytestconfig.getoption("--everything"):
        assert sum(emulated(architecture, files) for files in PARTS) >= 200
    else:
        some = ("test_gpu_linear.py", "test_gpu_engine.py", "test_gpu_delta.py", "-k", FEWER[architecture])
        assert emulate(architecture, *some, timeout=1700) >= 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("files", PARTS, ids="-".join)
def test_the_tests_of_the_kernels(files: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    """Half of them, or all with ``--everything``, but for most of those for a GPU, which take a quarter of an hour:
    ``EMULATED_SM=90 pytest -m ""`` runs them. On sm_90, whose kernels are the richest."""
    assert emulated(90, files, one_in=1 if pytestconfig.getoption("--everything") else 2) >= 50


def emulated(architecture: int, files: tuple[str, ...], one_in: int = 1) -> int:
    chosen = ("-k", f"not test_gpu or {FEW}")
    return emulate(architecture, *(f"test_{name}.py" for name in files), *chosen, timeout=1700, one_in=one_in)
