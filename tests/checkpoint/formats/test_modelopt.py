"""ModelOpt's layouts by their formulas, and its configurations. Its own quantizers judge in ``tests/interop``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.modelopt import ModelOpt
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import NVFP4_INPUTS, ActivationScheme, KVScheme, WeightScheme

FORMAT = ModelOpt()
Q, OUT, GATE = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_proj"
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(*shape: int) -> Tensor:
    """Random numbers that are none of the two NaNs."""
    return torch.randint(0, 126, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def parts_of(algorithm: str) -> tuple[dict[str, Tensor], Tensor]:
    """Random parts of a linear [32, 64], and its weight by the formula."""
    numbers, nibbles = e4m3(32, 64), torch.randint(0, 256, (32, 32), dtype=torch.uint8)
    if algorithm == "FP8":
        scale = torch.tensor(0.37)
        return {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, numbers.float() * scale
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = torch.rand(32)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale[:, None]
    if algorithm == "FP8_PB_WO":
        scale = torch.rand(2, 1, 4, 1)
        blocks = scale[:, 0, :, 0].repeat_interleave(16, 0).repeat_interleave(16, 1)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * blocks
    if "NVFP4" in algorithm:
        scale, whole = e4m3(32, 4), torch.tensor(0.0123)
        weight = FP4[torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(1).long()]
        parts = {"weight": nibbles, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}
        return parts, weight * (scale.float() * whole).repeat_interleave(16, 1)
    if algorithm == "W4A16_AWQ":
        scale, pairs = torch.rand(32, 4), nibbles.view(16, 64)
        signed = torch.empty(32, 64)
        signed[0::2], signed[1::2] = (pairs & 15).float(), (pairs >> 4).float()
        signed[signed > 7] -= 16
        return {"weight": pairs, "weight_scale": scale}, signed * scale.repeat_interleave(16, 1)
    scale, whole_numbers = torch.rand(32), torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    return {"weight": whole_numbers, "weight_scale": scale}, whole_numbers * scale[:, None]


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "fp8_pb_wo", "NVFP4",
                                       "W4A16_NVFP4", "W4A16_AWQ", "W8A16"])  # fmt: skip
def test_weights_by_their_formula(algorithm: str) -> None:
    parts, want = parts_of(algorithm.upper())
    spec = FORMAT.spec_of({"quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head"]}, [Q])
    scheme = spec.scheme_of(Q)
    assert scheme is not None and spec.ignored == ("lm_head",)
    got = FORMAT.unpack(parts, scheme, spec.activations_of(Q))
    assert torch.equal(got.dequantize(), want)
    assert FORMAT.shape(scheme, {name: tuple(part.shape) for name, part in parts.items()}, parts.get) == (32, 64)
    with pytest.raises(CheckpointError, match="pre_quant_scale"):
        FORMAT.unpack(parts | {"pre_quant_scale": torch.ones(64)}, scheme, spec.activations_of(Q))


def test_schemes_of_algorithms() -> None:
    def read(**said):
        return FORMAT.spec_of({"quant_algo": "FP8"} | said, [Q, OUT, "model.layers.1.mlp.gate"])

    assert read().activations == ActivationScheme("fp8", "tensor", dynamic=False)
    assert read(quant_algo="NVFP4").weights == WeightScheme(4, 16, dtype="fp4") and read().kv_cache is None
    assert read(quant_algo="NVFP4").activations == NVFP4_INPUTS and not read(quant_algo="W4A16_NVFP4").activations
    assert read(quant_algo="FP8_PB_WO").weights == WeightScheme(8, 128, dtype="fp8", rows=128)
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32}, "targets": ["Linear"]}}
    assert read(quant_algo="W4A16_AWQ", config_groups=groups).weights == WeightScheme(4, 32)
    assert read(kv_cache_quant_algo="FP8").kv_cache == KVScheme("fp8")
    assert read(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}).kv_cache == KVScheme("fp8")
    assert read(kv_cache_quant_algo="NVFP4").kv_cache is None  # stays finer
    excluded = {"exclude_modules": ["lm_head", "model.layers.1.*", "model.language_model.layers.0.self_attn"]}
    assert read(**excluded).ignored == ("lm_head", Q, OUT, "model.layers.1.mlp.gate")


def test_mixed_precision_lists_every_linear() -> None:
    layers = {Q: {"quant_algo": "FP8"}, OUT: {"quant_algo": "NVFP4", "group_size": 16}}
    spec = FORMAT.spec_of({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, [Q, OUT, GATE])
    assert [str(spec.scheme_of(module)) for module in (Q, OUT, GATE)] == ["fp8 per tensor", "fp4 g16", "None"]
    assert spec.activations_of(Q) == ActivationScheme("fp8", "tensor", dynamic=False) and not spec.activations_of(OUT)
    layers[GATE] = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    with pytest.raises(CheckpointError, match="one scheme for all"):
        FORMAT.spec_of({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, [Q])


@pytest.mark.parametrize(
    "said, words",
    [
        ({}, "quant_algo None is not supported"),
        ({"quant_algo": "NVFP4_SVD"}, "'NVFP4_SVD' is not supported; supported: FP8, .* MIXED_PRECISION of these"),
        ({"quant_algo": ["FP8"]}, "is not supported"),
        ({"quant_algo": "NVFP4", "group_size": "16"}, "group_size is '16'"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "ignore must be a list of names"),
        ({"quant_algo": "MIXED_PRECISION"}, "needs quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 1}}, "needs quantized_layers"),
    ],
)
def test_configurations_that_make_no_sense(said, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        FORMAT.spec_of(said, [Q])


@pytest.mark.parametrize("where", ["hf_quant_config.json", "both"])
def test_the_configuration_lies_in_a_file_of_its_own(tmp_path: Path, where: str) -> None:
    """What config.json says counts; the block size is in the other file alone."""
    parts, want = parts_of("W4A16_AWQ")
    save_file({f"{Q}.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    said = {"quant_algo": "W4A16_AWQ", "group_size": 16, "exclude_modules": ["lm_head", Q]}
    if where == "both":
        flat = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head"]}
    else:
        flat, said["exclude_modules"] = None, ["lm_head"]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": flat}))
    source = HFDirectory(tmp_path)
    assert source.linears() == [Q] and torch.equal(source.linear(Q).dequantize(), want)
