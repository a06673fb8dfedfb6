"""Experts in MXFP4 as OpenAI publishes them, against transformers' own dequantizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats.mxfp4 import MXFP4, read_e2m1, read_e8m0, write_e2m1, write_e8m0
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import MXFP4 as SCHEME
from qserve.checkpoint.spec import QuantSpec

STACK = "model.layers.0.mlp.experts"


def write(path: Path, blocks: Tensor, scales: Tensor, **more: Tensor) -> HFDirectory:
    bias = torch.randn(*blocks.shape[:2]).bfloat16()
    tensors = {f"{STACK}.down_proj_{part}": tensor for part, tensor in
               {"blocks": blocks, "scales": scales, "bias": bias}.items()}  # fmt: skip
    tensors |= {"model.layers.0.mlp.router.weight": torch.randn(2, 64), **more}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    return HFDirectory(path)


def test_every_byte_and_every_scale_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """All bytes at all 255 scales that are numbers."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16)
    stacked = torch.stack([blocks, blocks.flip(0)]).contiguous(), torch.stack([scales, scales.flip(0)]).contiguous()
    source = write(tmp_path, *stacked)
    assert source.linears() == [f"{STACK}.{e}.down_proj" for e in range(2)]
    assert source.shape(f"{STACK}.1.down_proj") == (255, 512)
    want = convert_moe_packed_tensors(*stacked, dtype=torch.float32).transpose(1, 2)
    for e, module in enumerate(source.linears()):
        got = source.linear(module)
        assert torch.equal(got.dequantize().view(torch.int32), want[e].contiguous().view(torch.int32))  # signs of zeros
        assert got.bias is not None and torch.equal(got.bias, source.tensor(f"{module}.bias").float())


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """The specification says so; transformers goes on to 2 ** 128."""
    scales = torch.full((1, 4, 2), 255, dtype=torch.uint8)
    blocks = torch.zeros(1, 4, 2, 16, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj: a scale is NaN"):
        write(tmp_path, blocks, scales).linear(f"{STACK}.0.down_proj")


def test_what_is_written_is_what_was_read() -> None:
    packed, scales = torch.arange(256, dtype=torch.uint8).view(4, 64), torch.arange(255, dtype=torch.uint8)
    assert torch.equal(write_e2m1(read_e2m1(packed)), packed)
    assert torch.equal(write_e8m0(read_e8m0(scales)), scales)
    for scale in (0.75, 0.0, -1.0):
        with pytest.raises(CheckpointError, match="no power of two"):
            write_e8m0(torch.tensor([1.0, scale]))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(2, 4, 2, 16, dtype=torch.uint8), torch.full((2, 4, 3), 127, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"down_proj: blocks are \[4, 2, 16\] for scales of \[4, 3\]"):
        write(tmp_path, blocks, scales).linear(f"{STACK}.0.down_proj")
    with pytest.raises(CheckpointError, match="scales is missing"):
        MXFP4().unpack({"blocks": blocks[0]}, SCHEME)


def test_it_is_read_and_not_written(tmp_path: Path) -> None:
    source = write(tmp_path, torch.zeros(1, 4, 2, 16, dtype=torch.uint8), torch.full((1, 4, 2), 127).byte())
    spec = source.spec
    assert spec is not None and spec.scheme_of("model.layers.0.mlp.router") is None
    assert spec.scheme_of(f"{STACK}.0.down_proj") == SCHEME
    with pytest.raises(UsageError, match="the GPTQ format holds integers of 2, 3, 4 or 8 bits, not fp4 g32"):
        convert(source, tmp_path / "out", "gptq")
    with pytest.raises(UsageError, match="read, not written"):
        MXFP4().config_of(QuantSpec("rtn", SCHEME))
    with pytest.raises(CheckpointError, match="read, not written"):
        MXFP4().pack(source.linear(f"{STACK}.0.down_proj"))
