"""Quark's layouts by their formulas, and its configurations. Its own quantizers judge in ``tests/interop``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.quark import Quark
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import ActivationScheme, KVScheme, WeightScheme

FORMAT = Quark()
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
TOKEN = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}
PLACES = [0, 2, 4, 6, 1, 3, 5, 7]


def layer(weight: Any, inputs: Any = None) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}


def config(weight: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": layer(weight, inputs), "exclude": ["lm_head"], **more}


def nibbles(values: Tensor) -> Tensor:
    """Whole numbers [out, n] -> int32 [n, out / 8]."""
    words = torch.zeros(values.shape[1], len(values) // 8, dtype=torch.int64)
    for place, number in enumerate(PLACES):
        words |= (values[number::8].t().long() & 15) << (4 * place)
    return words.to(torch.int32) if int(words.max()) < 2**31 else (words - (words >> 31 << 32)).to(torch.int32)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_four_bit_integers_by_their_formula(tmp_path: Path, kind: str) -> None:
    low = -8 if kind == "int4" else 0
    values = torch.randint(low, low + 16, (24, 64))
    zeros = torch.zeros(24, 2, dtype=torch.int64) if kind == "int4" else torch.randint(0, 16, (24, 2))
    scales = torch.rand(2, 24)
    weight = {"dtype": kind, "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "symmetric": kind == "int4"}
    parts = {"weight": nibbles(values), "weight_scale": scales, "weight_zero_point": nibbles(zeros)}
    save_file({f"{Q}.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    quantization = {"model_type": "llama", "quantization_config": config(weight)}
    (tmp_path / "config.json").write_text(json.dumps(quantization))
    source = HFDirectory(tmp_path)
    assert source.shape(Q) == (24, 64)
    want = (values - zeros.repeat_interleave(32, 1)) * scales.t().repeat_interleave(32, 1)
    assert torch.equal(source.linear(Q).dequantize(), want)
    if kind == "int4":
        with pytest.raises(CheckpointError, match="weight_zero_point is not 0"):
            FORMAT.unpack(parts | {"weight_zero_point": nibbles(zeros + 1)}, WeightScheme(4, 32))


def test_bytes_and_four_bit_floats_by_their_formula() -> None:
    numbers, scale = torch.randint(0, 126, (8, 64), dtype=torch.uint8).view(torch.float8_e4m3fn), torch.tensor(0.3)
    spec = FORMAT.spec_of(config(FP8, FP8), [Q])
    parts = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(2.0)}
    got = FORMAT.unpack(parts, WeightScheme(8, -1, dtype="fp8", rows=-1), spec.activations_of(Q))
    assert torch.equal(got.dequantize(), numbers.float() * scale) and got.input_scale == 2.0
    whole, scales = torch.randint(-128, 128, (8, 64), dtype=torch.int8), torch.rand(8)
    parts = {"weight": whole, "weight_scale": scales, "weight_zero_point": torch.zeros(8, dtype=torch.int8)}
    assert torch.equal(FORMAT.unpack(parts, WeightScheme(8, -1)).dequantize(), whole * scales[:, None])
    packed = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    powers = torch.randint(100, 140, (8, 2), dtype=torch.uint8)
    scheme = FORMAT.spec_of(config(FP4, FP4), [Q]).weights
    got = FORMAT.unpack({"weight": packed, "weight_scale": powers}, scheme)
    assert torch.equal(got.scales, torch.exp2(powers.float() - 127)) and torch.equal(got.codes[:, ::2], packed & 15)
    assert FORMAT.shape(scheme, {"weight": (8, 32)}, parts.__getitem__) == (8, 64)


def test_schemes_of_layers() -> None:
    own = {"*.mlp.*": layer(FP4, FP4), "model.layers.0.self_attn.o_proj": layer(None)}
    spec = FORMAT.spec_of(config(FP8, FP8, layer_quant_config=own), [Q, UP, "model.layers.0.self_attn.o_proj"])
    assert spec.scheme_of(UP) == WeightScheme(4, 32, dtype="fp4") and spec.activations_of(UP) is None
    assert str(spec.scheme_of(Q)) == "fp8 per tensor"
    assert spec.activations_of(Q) == ActivationScheme("fp8", "tensor", dynamic=False)
    assert spec.ignored == ("lm_head", "model.layers.0.self_attn.o_proj") and spec.kv_cache is None
    assert FORMAT.spec_of(config(FP8, TOKEN), [Q]).activations == ActivationScheme("fp8")
    cache = {"*k_proj": {"output_tensors": FP8}, "*v_proj": {"output_tensors": FP8}}
    assert FORMAT.spec_of(config(FP8, kv_cache_quant_config=cache), [Q]).kv_cache == KVScheme("fp8")


@pytest.mark.parametrize(
    "said, words",
    [
        ({"global_quant_config": None}, "must be an object"),
        (config(None), "no weight is quantized"),
        (config({"dtype": "fp6_e2m3", "qscheme": "per_group", "group_size": 32}), "weights of fp6_e2m3 per_group"),
        (config(FP4 | {"group_size": 16}), "weights of fp4 per_group"),
        (config({"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": None}), "group_size is None"),
        (config(FP8, {"dtype": "bfp16", "qscheme": "per_block"}), "inputs of bfp16 per_block"),
        (config(FP8, export={"pack_method": "order"}), "pack_method 'order'"),
        (config(FP8, export={"weight_format": "fake_quantized"}), "weight_format 'fake_quantized'"),
        (config(FP8, layer_type_quant_config={"Linear": {}}), "layer_type_quant_config"),
        (config(FP8, layer_quant_config=["a"]), "layer_quant_config must be an object"),
        (config(FP8, FP8, layer_quant_config={"*.mlp.*": layer(FP8, TOKEN)}), "one scheme for all"),
        (config(FP8, kv_cache_quant_config={"*k_proj": {"output_tensors": FP4}}), "a KV cache must be fp8_e4m3"),
        ({"global_quant_config": {"weight": FP8, "output_tensors": FP8}}, "rounded outputs"),
        (config(FP8, exclude="lm_head"), "exclude must be a list of names"),
    ],
)
def test_configurations_that_are_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        FORMAT.spec_of(said, [Q, UP])
