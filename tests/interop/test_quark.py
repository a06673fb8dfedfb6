"""Weights of Quark's checkpoints are those that its own quantizers make, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.hf import HFDirectory

pytestmark = pytest.mark.interop
KINDS = {
    "fp8": ("fp8 per tensor", "fp8 per tensor, static"),
    "fp8 per channel": ("fp8 per channel", "fp8 per token, dynamic"),
    "mxfp4": ("fp4 g32", "None"),
    "int4": ("4 bit g32 symmetric", "None"),
    "uint4": ("4 bit g32 asymmetric", "None"),
    "int8": ("8 bit per channel symmetric", "None"),
}


def test_weights_are_those_of_quark(
    judge: Callable[..., None], answers: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    paths = {kind: tmp_path / kind for kind in KINDS}
    for path in paths.values():
        path.mkdir()
    judge("quark", "quark_write.py", [(path, kind) for kind, path in paths.items()])
    for kind, path in paths.items():
        source, expected = HFDirectory(path), answers(path)
        assert source.spec is not None
        assert (str(source.spec.weights), str(source.spec.activations)) == KINDS[kind]
        assert sorted(f"{module}.weight" for module in source.linears()) == sorted(expected) and len(expected) == 14
        for module in source.linears():
            assert torch.equal(source.linear(module).dequantize(), expected[f"{module}.weight"]), (kind, module)
