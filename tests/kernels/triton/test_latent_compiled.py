"""The kernels of latent attention compiled for absent GPUs: registers, memory and instructions."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qserve.kernels.triton import latent_attention
from qserve.kernels.triton.target import described
from tests.kernels.triton.aot import Compiled, compile_file

CASES = Path(__file__).with_name("latent_cases.py")


def check(name: str, compiled: Compiled) -> None:
    architecture = re.findall(r"sm_\d+", name)[0]
    assert compiled.spills == 0, f"{name} spills"
    assert compiled.registers <= 255 and compiled.shared_bytes <= described(architecture).shared_bytes, name
    if name.startswith(("decodes", "tiles")):
        assert "async_copy_global_to_local" in compiled.ttgir, f"{name} waits for what it reads"
        assert "mma.sync.aligned.m16n8k16" in compiled.ptx, name


@pytest.mark.slow
def test_one_configuration_of_every_kernel() -> None:
    found = compile_file(CASES)
    assert len(found) == 12
    for name, compiled in found.items():
        check(name, compiled)
    gpu = described("sm_90")
    op: Any = SimpleNamespace(heads=128, rank=512, width=576, cache=torch.empty(0, dtype=torch.bfloat16))
    shape = latent_attention.decode_shape(op, gpu.shared_bytes, gpu.warp)
    decodes = found["decodes 128 sm_90"]
    assert decodes.shared_bytes == latent_attention.needed(op, shape)
    by_registers = (64 << 10) // (-(-decodes.registers // 8) * 8 * 32 * shape.warps)
    assert latent_attention.resident(op, shape, gpu.shared_bytes) <= by_registers


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_configuration_for_every_gpu(one_in: int) -> None:
    for name, compiled in compile_file(CASES, "every_case", 3500, one_in).items():
        check(name, compiled)
