"""Weights in NF4 are those that bitsandbytes makes of its own files."""

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
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_weights_are_those_of_bitsandbytes(
    judge: Callable[..., None], answers: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    paths = {nested: tmp_path / str(nested) for nested in (False, True)}
    for path in paths.values():
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": CONFIG}))
    judge("bitsandbytes", "nf4_write.py", [(path, MODULE, nested) for nested, path in paths.items()])
    for path in paths.values():
        assert torch.equal(HFDirectory(path).linear(MODULE).dequantize().bfloat16(), answers(path)["weight"])
