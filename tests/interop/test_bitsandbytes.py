"""Weights in NF4, FP4 and LLM.int8 are those that bitsandbytes makes of its own files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.hf import HFDirectory

pytestmark = pytest.mark.interop
MODULE = "model.layers.0.mlp.up_proj"
CASES = [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True), ("int8", False)]
"""(kind, nested scales)"""


def test_weights_are_those_of_bitsandbytes(
    judge: Callable[..., None], answers: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    paths = {case: tmp_path / f"{case[0]}-{case[1]}" for case in CASES}
    for (kind, _), path in paths.items():
        path.mkdir()
        bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
        config = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", **bits}}
        (path / "config.json").write_text(json.dumps(config))
    judge("bitsandbytes", "bitsandbytes_write.py", [(path, MODULE, *case) for case, path in paths.items()])
    for (kind, _), path in paths.items():
        source, expected = HFDirectory(path), answers(path)["weight"]
        found = source.linear(MODULE).dequantize()
        if kind == "int8":  # it rounds after the first of two products, which one scale for a row cannot
            codes, largest = source.linear(MODULE).codes.float() - 128, source.tensor(f"{MODULE}.SCB")
            assert torch.equal(codes * largest[:, None] * (1 / 127), expected)
            torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
        else:
            assert torch.equal(found.bfloat16(), expected)
