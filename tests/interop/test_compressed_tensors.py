"""compressed-tensors decompresses what we write, and transformers computes our logits with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

pytestmark = pytest.mark.interop

INT8 = ActivationScheme("int8")
FP8 = ActivationScheme("fp8")
MIXED = {"model.layers.1.mlp.down_proj": WeightScheme(8, 32), "model.layers.0.self_attn.q_proj": WeightScheme(3, 64)}
SPECS = {
    "pack-quantized, 2 bits": QuantSpec("rtn", WeightScheme(2, 32)),
    "pack-quantized, 3 bits": QuantSpec("rtn", WeightScheme(3, 32)),
    "pack-quantized, 4 bits": QuantSpec("rtn", WeightScheme(4, 32)),
    "pack-quantized, 6 bits": QuantSpec("rtn", WeightScheme(6, 32)),
    "pack-quantized, 8 bits": QuantSpec("rtn", WeightScheme(8, 32)),
    "pack-quantized, per channel": QuantSpec("rtn", WeightScheme(4, -1)),
    "pack-quantized, asymmetric": QuantSpec("rtn", WeightScheme(4, 32, False)),
    "pack-quantized, 3 bits asymmetric": QuantSpec("rtn", WeightScheme(3, 32, False)),
    "pack-quantized, mixed, ignored": QuantSpec("rtn", WeightScheme(4, 32), overrides=MIXED,
                                                ignored=("lm_head", "model.layers.0.mlp.up_proj")),
    "int-quantized": QuantSpec("rtn", WeightScheme(8, -1), INT8),
    "float-quantized, per channel": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8"), FP8),
    "float-quantized, static": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8", rows=-1),
                                         ActivationScheme("fp8", "tensor", dynamic=False)),
    "float-quantized, blocks": QuantSpec("rtn", WeightScheme(8, 32, dtype="fp8", rows=32),
                                         ActivationScheme("fp8", "group", group_size=32)),
    "naive-quantized": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8")),
}


# What rounds its inputs is compared more loosely: an input that two ways of adding put on either side of a rounding
# boundary moves by a whole step. Int8 scales differ too: compressed-tensors divides by 127.5, we by 127.
LOGITS = {
    "pack-quantized, 3 bits": 1e-4,
    "pack-quantized, 4 bits": 1e-4,
    "pack-quantized, asymmetric": 5e-3,
    "pack-quantized, mixed, ignored": 1e-4,
    "naive-quantized": 1e-4,
    "int-quantized": 2e-2,
    "float-quantized, per channel": 5e-2,
    "float-quantized, static": 5e-2,
}
# compressed-tensors 0.20 prepares a model for zero points that are not packed, although it packs them itself, so such
# files (its own too) load only where transformers is told to dequantize them at once, which it does in float16.
AT_ONCE = ("pack-quantized, asymmetric",)


@pytest.fixture(scope="module")
def decompressed(judge, packed_llama, tmp_path_factory) -> dict[str, Path]:
    """Our checkpoints, which compressed-tensors has decompressed."""
    root = tmp_path_factory.mktemp("decompressed")
    found = {kind: packed_llama(root / kind, "compressed-tensors", spec) for kind, spec in SPECS.items()}
    judge("compressed-tensors", "decompress.py", [(path,) for path in found.values()])
    return found


@pytest.fixture(scope="module")
def loaded(judge, packed_llama, tmp_path_factory) -> dict[str, Path]:
    """Our checkpoints, which transformers has loaded."""
    root = tmp_path_factory.mktemp("loaded")
    found = {kind: packed_llama(root / kind, "compressed-tensors", SPECS[kind]) for kind in LOGITS}
    judge("compressed-tensors", "transformers_read.py", [(path, kind in AT_ONCE) for kind, path in found.items()])
    return found


@pytest.mark.parametrize("kind", SPECS)
def test_compressed_tensors_decompresses_what_we_write(kind, decompressed, answers) -> None:
    theirs, source = answers(decompressed[kind]), open_model(decompressed[kind])
    assert set(theirs) == {f"{module}.weight" for module in source.linears()}
    for module in source.linears():
        assert torch.equal(theirs[f"{module}.weight"], source.linear(module).dequantize()), module


@pytest.mark.parametrize("kind", LOGITS)
def test_transformers_gives_our_logits(kind, loaded, answers, our_logits) -> None:
    theirs, source = answers(loaded[kind]), open_model(loaded[kind])
    for module in source.linears():
        weight = source.linear(module).dequantize()
        torch.testing.assert_close(theirs[f"{module}.weight"], weight, rtol=1e-3 if kind in AT_ONCE else 1e-6, atol=0)
    ours = our_logits(source)
    assert (ours - theirs["logits"]).abs().max() < LOGITS[kind] * ours.abs().max()
