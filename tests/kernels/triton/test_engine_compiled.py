"""The kernels beside the linear products compiled for GPUs that are not here: registers, memory and instructions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from qserve.kernels.triton.target import shared_bytes

HERE = Path(__file__).parent


def check(name: str, compiled: Any) -> None:
    capability = tuple(int(digit) for digit in re.findall(r"sm_(\d+)(\d)", name)[0])
    assert compiled.spills == 0, f"{name} spills"
    assert compiled.registers <= 255 and compiled.shared_bytes <= shared_bytes(capability), name
    if name.startswith("attention") and "merge" not in name:
        assert "async_copy_global_to_local" in compiled.ttgir, f"{name} waits for its keys"
        # As wide as a row of a page allows.
        assert re.search(r"LDGSTS\.E\.\S*128", compiled.sass), f"{name} copies in small pieces"
    if name.startswith("attention decodes") and "invariant" not in name:
        assert "mma.sync.aligned.m16n8k16" in compiled.ptx, name
    if name.startswith("attention tiles") and " 256 " not in name:
        unit = {(9, 0): "wgmma.mma_async", (10, 0): "tcgen05.mma"}.get(capability, "mma.sync.aligned.m16n8k16")
        assert unit in compiled.ptx, name


def compiled_by(function: str, timeout: float = 280) -> dict[str, Any]:
    import sys

    sys.path.insert(0, str(HERE))
    try:
        from aot import compile_file
    finally:
        sys.path.remove(str(HERE))
    return compile_file(HERE / "engine_cases.py", function, timeout)


def test_one_configuration_of_every_kernel_for_every_gpu() -> None:
    found = compiled_by("cases")
    assert len(found) == 44
    for name, compiled in found.items():
        check(name, compiled)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_configuration_for_every_gpu() -> None:
    for name, compiled in compiled_by("every_case", timeout=1700).items():
        check(name, compiled)
