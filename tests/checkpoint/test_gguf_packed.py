"""Blocks of llama.cpp's as codes, scales and zero points, beside the ``gguf`` package's own reading of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.gguf_packed import KINDS, unpacked
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme

from .test_gguf import random_model, save_gguf

HALVES = {
    Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q4_1: (0, 2), Kind.Q5_1: (0, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_bytes(kind: Kind) -> None:
    """Some scales are 0: then a block is its minimum."""
    rng, (numbers, size) = np.random.default_rng(0), GGML_QUANT_SIZES[kind]
    rows, blocks = 9, 6
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        floats = rng.standard_normal((rows, blocks)).astype(np.float16)
        floats[::4, ::2] *= at != 0  # the first is the scale
        raw[..., at : at + 2] = floats.view(np.uint8).reshape(rows, blocks, 2)
    want = torch.from_numpy(np.ascontiguousarray(dequantize(raw.reshape(rows, -1), kind)))
    codes, scales, zeros = unpacked(kind, raw.reshape(-1), rows, size)
    weight = QuantizedWeight(KINDS[kind].scheme, codes.contiguous(), scales.contiguous(), zeros)
    weight.check()
    assert weight.codes.shape == (rows, blocks * numbers) and bool((scales == 0).any()) == (zeros is None)
    # d * code + m and (code + m / d) * d are rounded in another order.
    step = scales.abs().repeat_interleave(weight.scheme.group_size, 1)
    assert bool(((weight.dequantize() - want).abs() <= 2.0**-20 * (step * 32 + want.abs())).all())


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_linears_are_packed_and_all_else_is_not(tmp_path: Path, architecture: str, kind: Kind) -> None:
    path = save_gguf(tmp_path / "m.gguf", random_model(architecture), kind)
    source, packed = GGUFFile(path), GGUFFile(path).packed()
    assert len(packed.linears()) == 14 and packed.spec is not None and packed.spec.weights == KINDS[kind].scheme
    assert packed.has("model.embed_tokens.weight") and packed.has("lm_head.weight")
    assert {*packed.names(), *(f"{module}.weight" for module in packed.linears())} <= {*source.names()}
    for module in packed.linears():
        weight = packed.linear(module)
        torch.testing.assert_close(weight.dequantize(), source.tensor(f"{module}.weight"), rtol=0, atol=1e-6)
        if f"{module}.bias" in source.names():
            assert weight.bias is not None and torch.equal(weight.bias, source.tensor(f"{module}.bias").float())
    assert packed.packed() is packed and source.linears() == []


def test_files_that_stay_as_they_are(tmp_path: Path) -> None:
    """A base is held in floats, and so are kinds that no kernel multiplies."""
    path = save_gguf(tmp_path / "m.gguf", random_model("llama"), Kind.Q8_0)
    base = GGUFFile(path, in_floats=True)
    assert base.packed() is base
    floats = GGUFFile(save_gguf(tmp_path / "f.gguf", random_model("llama"), Kind.F16))
    assert floats.packed() is floats


def test_kinds_of_one_file_may_differ(tmp_path: Path) -> None:
    """Then the commonest is the scheme of the model. A matrix in floats stays dense."""
    model = random_model("llama")
    path = tmp_path / "m.gguf"
    writer_of, mixed = GGUFWriter.add_tensor, {"blk.0.ffn_down.weight": Kind.Q4_0, "blk.1.attn_v.weight": Kind.F32}

    def add(self: GGUFWriter, name: str, array: np.ndarray, raw_dtype: Kind | None = None) -> None:
        if name in mixed:
            array, raw_dtype = dequantize(array, Kind.Q8_0), mixed[name]
            array = quantize(array, raw_dtype)
        writer_of(self, name, array, raw_dtype=raw_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", add)
        save_gguf(path, model, Kind.Q8_0)
    packed = GGUFFile(path).packed()
    assert packed.spec is not None and packed.spec.weights == WeightScheme(8, 32)
    assert dict(packed.spec.overrides) == {"model.layers.0.mlp.down_proj": WeightScheme(4, 32)}
    assert packed.has("model.layers.1.self_attn.v_proj.weight") and len(packed.linears()) == 13
    assert packed.spec.scheme_of("model.layers.1.self_attn.v_proj") is None
