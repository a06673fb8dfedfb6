"""transformers loads our ``fp8`` checkpoints. Without a GPU it dequantizes them, so the tests compare weights, and
logits of inputs that are not rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qserve.checkpoint.formats import format_named
from qserve.checkpoint.loaders import verdicts
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

pytestmark = pytest.mark.interop

BLOCKS = QuantSpec("rtn", WeightScheme(8, 32, dtype="fp8", rows=32),
                   ActivationScheme("fp8", "group", group_size=32))
PER_TENSOR = QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8", rows=-1), ActivationScheme("fp8"))
SPECS = {"blocks": BLOCKS, "per tensor": PER_TENSOR}


@pytest.fixture(scope="module")
def loaded(judge, packed_llama, tmp_path_factory) -> dict[str, Path]:
    """Our checkpoints, which transformers has loaded, or refused."""
    root = tmp_path_factory.mktemp("loaded")
    found = {kind: packed_llama(root / kind, "fp8", spec) for kind, spec in SPECS.items()}
    judge("compressed-tensors", "transformers_read.py", [(path,) for path in found.values()])
    return found


def accepted(path: Path, spec: QuantSpec) -> bool:
    """What we say beforehand that transformers will make of it."""
    source = open_model(path)
    shapes = {module: source.shape(module) for module in source.linears()}
    return verdicts(spec, shapes, ["transformers"], format=format_named("fp8"))[0].accepts  # type: ignore[arg-type]


def test_transformers_dequantizes_blocks(loaded, answers, our_logits) -> None:
    path = loaded["blocks"]
    assert accepted(path, BLOCKS)
    theirs, source = answers(path), open_model(path)
    for module in source.linears():
        weight = source.linear(module).dequantize()
        torch.testing.assert_close(theirs[f"{module}.weight"], weight, rtol=1e-6, atol=0)
    ours = our_logits(source, round_inputs=False)
    assert (ours - theirs["logits"]).abs().max() < 1e-4 * ours.abs().max()


def test_scales_per_tensor_are_rightly_not_for_transformers(loaded, answers) -> None:
    """It has other names for them than vLLM, whose names these are: it would load the weights without their scales."""
    assert not accepted(loaded["per tensor"], PER_TENSOR)
    with pytest.raises(AssertionError, match=r"unexpected_keys.*weight_scale"):
        answers(loaded["per tensor"])
