"""A model that was released in fp8 is quantized as if it were stored in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import open_model
from qserve.checkpoint.unpacked import Unpacked
from qserve.evals.transformers_scorer import TransformersScorer
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "text.txt"
    path.write_text("some words that follow each other. " * 60)
    return {"samples": 4, "sequence_length": 32, "calibration": str(path)}


@pytest.mark.parametrize("scheme", ["fp8-tensor", "fp8"])
def test_fp8_is_dequantized_on_the_way(scheme: Any, qwen2: Path, small: dict[str, Any], tmp_path: Path) -> None:
    """Its biases are there, too."""
    released = tmp_path / "released"
    pipeline.run(HFDirectory(qwen2), released, QuantizeJob(scheme=scheme, method="rtn", calibration=None))
    source = open_model(released)
    view = Unpacked(source)
    assert set(view.names()) == set(HFDirectory(qwen2).names()) and not view.linears()
    name = source.linears()[0]
    weight = view.tensor(f"{name}.weight")
    torch.testing.assert_close(weight.float(), source.linear(name).dequantize(), rtol=1e-2, atol=1e-4)
    assert view.nbytes(f"{name}.weight") == 2 * weight.numel()
    report = pipeline.run(source, tmp_path / "out", QuantizeJob(bits=8, group_size=32, **small))
    result = open_model(tmp_path / "out")
    assert set(result.linears()) == set(source.linears()) and len(report.layers) == len(result.linears())
    tokens = list(range(40, 90))
    base, found = (torch.cat([rows for _, rows in TransformersScorer(each).score(tokens)]) for each in (view, result))
    assert float((base.exp() * (base - found)).sum(-1).mean()) < 0.02


def test_what_was_calibrated_here_is_not_a_release(qwen2: Path, small: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "calibrated"
    pipeline.run(HFDirectory(qwen2), out, QuantizeJob(scheme="fp8", method="gptq", **small))
    with pytest.raises(UsageError, match="already quantized"):
        pipeline.check(open_model(out), tmp_path / "again", QuantizeJob(**small))
