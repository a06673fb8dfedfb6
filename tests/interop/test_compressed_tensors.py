"""compressed-tensors decompresses what we write, and transformers computes our logits with it, in each of its ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import MXFP4, MXFP8, NVFP4, NVFP4_INPUTS, ActivationScheme, QuantSpec, WeightScheme

pytestmark = pytest.mark.interop

INT8 = ActivationScheme("int8")
FP8 = ActivationScheme("fp8")
MIXED = {"model.layers.1.mlp.down_proj": WeightScheme(8, 32), "model.layers.0.self_attn.q_proj": WeightScheme(3, 64)}
EIGHT = {"model.layers.1.mlp.down_proj": WeightScheme(8, 32)}
SPECS = {
    "pack-quantized, 2 bits": QuantSpec("rtn", WeightScheme(2, 32)),
    "pack-quantized, 3 bits": QuantSpec("rtn", WeightScheme(3, 32)),
    "pack-quantized, 4 bits": QuantSpec("rtn", WeightScheme(4, 32)),
    "pack-quantized, 5 bits": QuantSpec("rtn", WeightScheme(5, 32)),
    "pack-quantized, 6 bits": QuantSpec("rtn", WeightScheme(6, 32)),
    "pack-quantized, 8 bits": QuantSpec("rtn", WeightScheme(8, 32)),
    "pack-quantized, per channel": QuantSpec("rtn", WeightScheme(4, -1)),
    "pack-quantized, asymmetric": QuantSpec("rtn", WeightScheme(4, 32, False)),
    "pack-quantized, 3 bits asymmetric": QuantSpec("rtn", WeightScheme(3, 32, False)),
    "pack-quantized, 5 bits asymmetric": QuantSpec("rtn", WeightScheme(5, 32, False)),
    "pack-quantized, mixed, ignored": QuantSpec("rtn", WeightScheme(4, 32), overrides=MIXED,
                                                ignored=("lm_head", "model.layers.0.mlp.up_proj")),
    "pack-quantized, 4 and 8 bits": QuantSpec("rtn", WeightScheme(4, 32), overrides=EIGHT),
    "int-quantized": QuantSpec("rtn", WeightScheme(8, -1), INT8),
    "float-quantized, per channel": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8"), FP8),
    "float-quantized, static": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8", rows=-1),
                                         ActivationScheme("fp8", "tensor", dynamic=False)),
    "float-quantized, blocks": QuantSpec("rtn", WeightScheme(8, 32, dtype="fp8", rows=32),
                                         ActivationScheme("fp8", "group", group_size=32)),
    "naive-quantized": QuantSpec("rtn", WeightScheme(8, -1, dtype="fp8")),
    "mxfp4-pack-quantized": QuantSpec("rtn", MXFP4),
    "nvfp4-pack-quantized": QuantSpec("rtn", NVFP4),
    "mxfp8-quantized": QuantSpec("rtn", MXFP8, ActivationScheme("fp8", "group", group_size=32)),
    "nvfp4-pack-quantized, inputs too": QuantSpec("rtn", NVFP4, NVFP4_INPUTS),
}


# How far logits may be off, of the largest. What rounds its inputs is compared more loosely: an input that two ways of
# adding put on either side of a rounding boundary moves by a whole step. Int8 scales differ too: compressed-tensors
# divides by 127.5, we by 127.
EXACT, ROUNDED_FP8, ROUNDED_INT8 = 1e-4, 5e-2, 2e-2
# transformers loads a checkpoint in two ways: it decompresses weights on the first forward pass, or, told to
# dequantize, while it loads them. It does the latter in float16, with inputs that nobody rounds.
AT_ONCE = 2e-3
REFUSED = {
    # compressed-tensors 0.20 prepares a model for zero points that are not packed, although it packs them itself: its
    # own files do not load so either.
    ("pack-quantized, asymmetric", False): "ignore_mismatched_sizes",
    ("pack-quantized, 3 bits asymmetric", False): "ignore_mismatched_sizes",
    ("pack-quantized, 5 bits asymmetric", False): "ignore_mismatched_sizes",
    # At once all weights are taken for those of the first group of the configuration.
    ("pack-quantized, mixed, ignored", True): "issues during automatic conversion",
    # It loads, and says that nothing takes these scales.
    ("float-quantized, static", True): r"unexpected_keys.*input_scale",
    ("nvfp4-pack-quantized, inputs too", True): r"unexpected_keys.*input_global_scale",
}
# The same where 8 bits fill words as 4 do: nothing is refused, and those weights are wrong.
MISTAKEN = ("pack-quantized, 4 and 8 bits", True)
WAYS = [(kind, at_once) for kind in SPECS for at_once in (False, True)]


def named(value: object) -> str:
    return {False: "on the first pass", True: "at once"}.get(value, value)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def decompressed(judge, packed_llama, tmp_path_factory) -> dict[str, Path]:
    """Our checkpoints, which compressed-tensors has decompressed."""
    root = tmp_path_factory.mktemp("decompressed")
    found = {kind: packed_llama(root / kind, "compressed-tensors", spec) for kind, spec in SPECS.items()}
    judge("compressed-tensors", "decompress.py", [(path,) for path in found.values()])
    return found


@pytest.fixture(scope="module")
def loaded(judge, packed_llama, tmp_path_factory) -> dict[tuple[str, bool], Path]:
    """Our checkpoints, which transformers has loaded, or refused."""
    root = tmp_path_factory.mktemp("loaded")
    found = {(kind, at_once): packed_llama(root / f"{kind} {at_once}", "compressed-tensors", SPECS[kind])
             for kind, at_once in WAYS}
    judge("compressed-tensors", "transformers_read.py", [(path, at_once) for (_, at_once), path in found.items()])
    return found


@pytest.mark.parametrize("kind", SPECS)
def test_compressed_tensors_decompresses_what_we_write(kind, decompressed, answers) -> None:
    theirs, source = answers(decompressed[kind]), open_model(decompressed[kind])
    assert set(theirs) == {f"{module}.weight" for module in source.linears()}
    for module in source.linears():
        assert torch.equal(theirs[f"{module}.weight"], source.linear(module).dequantize()), module


@pytest.mark.parametrize("kind, at_once", [way for way in WAYS if way not in {*REFUSED, MISTAKEN}], ids=named)
def test_transformers_gives_our_logits(kind, at_once, loaded, answers, our_logits) -> None:
    theirs, source = answers(loaded[kind, at_once]), open_model(loaded[kind, at_once])
    for module in source.linears():
        weight = source.linear(module).dequantize()
        rtol, atol = (1e-3, 2**-25) if at_once else (1e-6, 0)
        torch.testing.assert_close(theirs[f"{module}.weight"], weight, rtol=rtol, atol=atol)
    activations = SPECS[kind].activations
    limit = (AT_ONCE if at_once else EXACT if activations is None
             else ROUNDED_FP8 if activations.dtype == "fp8" else ROUNDED_INT8)
    ours = our_logits(source, round_inputs=not at_once)
    assert (ours - theirs["logits"]).abs().max() < limit * ours.abs().max()


@pytest.mark.parametrize("kind, at_once", REFUSED, ids=named)
def test_transformers_loads_it_only_the_other_way(kind, at_once, loaded, answers) -> None:
    with pytest.raises(AssertionError, match=REFUSED[kind, at_once]):
        answers(loaded[kind, at_once])
    assert (kind, not at_once) not in REFUSED


def test_transformers_mistakes_a_second_width_for_the_first(loaded, answers) -> None:
    theirs, source = answers(loaded[MISTAKEN]), open_model(loaded[MISTAKEN])
    for module in source.linears():
        weight = source.linear(module).dequantize()
        right = torch.allclose(theirs[f"{module}.weight"], weight, rtol=1e-3, atol=2**-25)
        assert right == (module not in EIGHT), module
