"""Weights in MXFP4 and NVFP4 are those that compressed-tensors makes of the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qserve.checkpoint.formats import format_named
from qserve.checkpoint.spec import WeightScheme

pytestmark = pytest.mark.interop


def test_weights_are_those_of_compressed_tensors(
    judge: Callable[..., None], answers: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    generator = torch.Generator().manual_seed(0)
    ours, jobs = {}, []
    for preset, format, size in (("MXFP4A16", "mxfp4-pack-quantized", 32), ("NVFP4A16", "nvfp4-pack-quantized", 16)):
        parts = {"weight_packed": codes, "weight_scale": torch.randint(100, 140, (16, 512 // size), generator=generator)
                 .to(torch.uint8)}  # fmt: skip
        if size == 16:
            parts["weight_scale"] = (parts["weight_scale"] - 90).view(torch.float8_e4m3fn)
            parts["weight_global_scale"] = torch.tensor([1234.5])
        path = tmp_path / preset
        path.mkdir()
        save_file(parts, path / "parts.safetensors")
        ours[path] = format_named("compressed-tensors").unpack(parts, WeightScheme(4, size, dtype="fp4")).dequantize()
        jobs.append((path, preset, format))
    judge("compressed-tensors", "fp4_read.py", jobs)
    for path, weight in ours.items():
        assert torch.equal(weight.bfloat16(), answers(path)["weight"])
