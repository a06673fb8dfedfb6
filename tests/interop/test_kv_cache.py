"""KV-cache scales in compressed-tensors checkpoints: transformers computes with ours, and we with theirs.

compressed-tensors rounds what attention caches as the scales in the checkpoint say, so logits are compared with ours of
a rounded cache. It knows no centre of keys.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.kv import kv_scales
from qserve.checkpoint.source import ModelSource, open_model
from qserve.checkpoint.spec import KVScheme, QuantSpec, WeightScheme

pytestmark = pytest.mark.interop

WEIGHTS = WeightScheme(4, 32)
KINDS = {
    "fp8 per tensor": KVScheme("fp8"),
    "fp8 per head": KVScheme("fp8", "head"),
    "int8 per tensor": KVScheme("int8"),
    "int8 per head": KVScheme("int8", "head"),
}
SHAPES = {"tensor": (1,), "head": (2, 1, 1)}  # two KV heads


@pytest.fixture(scope="module")
def ours(judge, packed_llama, tmp_path_factory) -> dict[tuple[str, bool], Path]:
    """Our checkpoints, which transformers has loaded: decompressed on the first pass, and dequantized at once."""
    root = tmp_path_factory.mktemp("ours")
    found = {(kind, at_once): packed_llama(root / f"{kind} {at_once}", "compressed-tensors",
                                           QuantSpec("rtn", WEIGHTS, kv_cache=scheme))
             for kind, scheme in KINDS.items() for at_once in (False, True)}
    judge("compressed-tensors", "transformers_read.py", [(path, at_once) for (_, at_once), path in found.items()])
    return found


@pytest.fixture(scope="module")
def written(judge, dense_llama, tmp_path_factory) -> dict[str, Path]:
    """The checkpoints that compressed-tensors made of the dense llama."""
    root = tmp_path_factory.mktemp("written")
    found = {kind: shutil.copytree(dense_llama, root / kind) for kind in KINDS}
    judge("compressed-tensors", "kv_write.py", [
        (found[kind], "int" if scheme.dtype == "int8" else "float",
         "tensor" if scheme.granularity == "tensor" else "attn_head")
        for kind, scheme in KINDS.items()
    ])
    return found


def scales_agree(theirs: dict[str, Tensor], source: ModelSource, scheme: KVScheme) -> None:
    """Every scale that the other knows is one of ours and the other way round."""
    names = {f"model.layers.{layer}.self_attn.{letter}_scale" for layer in (0, 1) for letter in "kv"}
    assert {name for name in theirs if name.endswith(("k_scale", "v_scale"))} == names
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn"
        for letter, scale in zip("kv", kv_scales(source, attention), strict=True):
            name = f"{attention}.{letter}_scale"
            assert tuple(theirs[name].shape) == source.shape(name) == SHAPES[scheme.granularity]
            assert torch.equal(theirs[name].float().reshape(-1), scale)


def error(logits: Tensor, of: Tensor) -> float:
    return float((logits - of).abs().max() / of.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_with_our_scales(kind, ours, answers, our_logits) -> None:
    theirs, source = answers(ours[kind, False]), open_model(ours[kind, False])
    scales_agree(theirs, source, KINDS[kind])
    assert error(theirs["logits"], our_logits(source, centered=False)) < 3e-3
    assert error(theirs["logits"], our_logits(source, round_kv=False)) > 6e-3  # which is how far rounding moves them


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_center_is_worth(kind, ours, answers, our_logits) -> None:
    """Scales of e4m3 fit keys as they are. Those of int8 fit keys less their mean, which others do not subtract, so
    they cut keys off: such a checkpoint is for us alone."""
    theirs, source = answers(ours[kind, False]), open_model(ours[kind, False])
    exact = our_logits(source, round_kv=False)
    ratio = error(theirs["logits"], exact) / error(our_logits(source), exact)
    assert ratio < 1.5 if KINDS[kind].dtype == "fp8" else ratio > 3


@pytest.mark.parametrize("kind", KINDS)
def test_at_once_nothing_takes_the_scales(kind, ours, answers) -> None:
    """What transformers dequantizes while it loads has a cache in floating point; that it drops the scales, it says."""
    with pytest.raises(AssertionError, match=r"unexpected_keys.*k_scale"):
        answers(ours[kind, True])


@pytest.mark.parametrize("kind", KINDS)
def test_we_read_what_compressed_tensors_writes(kind, written, answers, our_logits) -> None:
    theirs, source = answers(written[kind]), open_model(written[kind])
    assert source.spec.kv_cache == KINDS[kind] and source.spec.weights == WEIGHTS and len(source.linears()) == 14
    scales_agree(theirs, source, KINDS[kind])
    for module in source.linears():
        torch.testing.assert_close(theirs[f"{module}.weight"], source.linear(module).dequantize(), rtol=1e-6, atol=0)
    # Its int8 codes go down to -128, which is the largest magnitude here; ours to -127.
    limit = 1e-3 if KINDS[kind].dtype == "fp8" else 1.1e-2
    assert error(theirs["logits"], our_logits(source)) < limit
    assert error(theirs["logits"], our_logits(source, round_kv=False)) > 1.3e-2
