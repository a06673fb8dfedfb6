"""The kernels beside the linear products compiled for absent GPUs: registers, memory and instructions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from qserve.kernels.triton import attention
from qserve.kernels.triton.target import described
from tests.kernels.triton.aot import compile_file, may_spill
from tests.kernels.triton.engine_cases import attention_op

HERE = Path(__file__).parent


def check(name: str, compiled: Any) -> None:
    architecture = re.findall(r"sm_\d+", name)[0]
    assert compiled.spills == 0 or may_spill(name), f"{name} spills"
    assert compiled.registers <= 255 and compiled.shared_bytes <= described(architecture).shared_bytes, name
    if name.startswith("attention"):
        assert "async_copy_global_to_local" in compiled.ttgir, f"{name} waits for what it reads"
    if name.startswith("attention") and "merge" not in name:
        # As wide as a row of a page allows; a thread of few codes of 4 bits has 8 bytes of them.
        width = "(64|128)" if "4 bits" in name or " u8 " in name else "128"
        assert re.search(rf"LDGSTS\.E\.\S*{width}", compiled.sass), f"{name} copies in small pieces"
    if name.startswith("attention decodes") and "invariant" not in name:
        # So many heads share a key head that their rows fill the larger unit of a Hopper or Blackwell, too.
        units = ("mma.sync.aligned.m16n8k16", *(("wgmma.mma_async", "tcgen05.mma") if "shared" in name else ()))
        assert any(unit in compiled.ptx for unit in units), name
    if name.startswith("attention tiles") and " 256 " not in name:
        unit = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(architecture, "mma.sync.aligned.m16n8k16")
        assert unit in compiled.ptx, name


def compiled_by(function: str, timeout: float = 280, one_in: int = 1) -> dict[str, Any]:
    made: dict[str, Any] = compile_file(HERE / "engine_cases.py", function, timeout, one_in)
    return made


def summed(compiled: Any) -> str:
    """How the numbers of a row are dealt to threads where they are added up."""
    layout = re.search(r"arith\.addf.*\n.*tt\.reduce\.return.*\n.*\(tensor<\w+, (#\w+)>\)", compiled.ttgir)
    assert layout
    return re.findall(rf"^{layout[1]} = (.*)$", compiled.ttgir, re.M)[0]


@pytest.mark.slow
def test_one_configuration_of_every_kernel_for_every_gpu() -> None:
    found = compiled_by("cases")
    assert len(found) == 87
    for name, compiled in found.items():
        check(name, compiled)
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100"):
        alone, rounded = (summed(found[f"norm{kind} {arch}"]) for kind in ("", " rounded"))
        assert alone == rounded, "a norm that rounds adds in another order"


@pytest.mark.slow
def test_a_multiprocessor_holds_the_programs_that_share_out_decodes() -> None:
    """Of sm_89 and sm_90, by registers and shared memory (CUDA programming guide, compute capabilities)."""
    found = compiled_by("decode_cases")
    for name, compiled in found.items():
        check(f"decodes {name}", compiled)
        cache, dim, architecture = name.split()
        bytes_each = described(architecture).shared_bytes
        op = attention_op(cache, dim=int(dim))
        shape = attention.decode_shape(op)
        registers = -(-compiled.registers // 8) * 8 * 32 * shape.warps
        holds = min((64 << 10) // registers, (bytes_each + 1024) // (compiled.shared_bytes + 1024))
        assert attention.resident(op, shape, bytes_each) <= max(1, holds), name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_configuration_for_every_gpu(one_in: int) -> None:
    for name, compiled in compiled_by("every_case", 3500, one_in).items():
        check(name, compiled)
