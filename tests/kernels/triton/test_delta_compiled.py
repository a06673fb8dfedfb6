"""The kernels of gated delta nets compiled for absent GPUs: registers, memory and instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qserve.kernels.triton.target import described
from tests.kernels.triton.aot import Compiled, compile_file

CASES = Path(__file__).with_name("delta_cases.py")


def check(name: str, compiled: Compiled) -> None:
    architecture = re.findall(r"sm_\d+", name)[0]
    # The state, keys and their products take all registers that there are: of a run on sm_89, two too many.
    assert compiled.spills <= (32 if name.startswith("fold") else 0), f"{name} spills"
    assert compiled.registers <= 255 and compiled.shared_bytes <= described(architecture).shared_bytes, name
    if name.startswith(("solve", "scores", "fold")):
        assert any(unit in compiled.ptx for unit in ("mma.sync.aligned", "wgmma.mma_async", "tcgen05.mma")), name


@pytest.mark.slow
def test_one_configuration_of_every_kernel() -> None:
    found = compile_file(CASES)
    assert len(found) == 7
    for name, compiled in found.items():
        check(name, compiled)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_configuration_for_every_gpu(one_in: int) -> None:
    for name, compiled in compile_file(CASES, "every_case", 3500, one_in).items():
        check(name, compiled)
