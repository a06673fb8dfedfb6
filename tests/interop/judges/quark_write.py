"""Quark quantizes a tiny llama, exports it, and says what its own quantizers make of the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from llama import run_jobs
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization.config import config as quark
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

PER_TENSOR = {"observer_method": "min_max", "is_dynamic": False}
SPECS = {
    "fp8": (quark.FP8E4M3PerTensorSpec(**PER_TENSOR), quark.FP8E4M3PerTensorSpec(**PER_TENSOR)),
    "fp8 per channel": (
        quark.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
        quark.FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1),
    ),
    "mxfp4": (quark.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False), quark.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True)),
    "int4": (quark.Int4PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=False), None),
    "uint4": (quark.Uint4PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=False), None),
    "int8": (quark.Int8PerChannelSpec(symmetric=True, ch_axis=0, is_dynamic=False), None),
}


def main(directory: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    ))  # fmt: skip
    weight, inputs = (None if spec is None else spec.to_quantization_spec() for spec in SPECS[kind])
    layers = quark.QLayerConfig(weight=weight, input_tensors=inputs)
    settings = quark.QConfig(global_quant_config=layers, exclude=["lm_head"])
    tokens = torch.randint(3, 96, (4, 32))
    quantizer = ModelQuantizer(settings)
    model = quantizer.quantize_model(model, [tokens])
    model = quantizer.freeze(model)
    expected = {
        f"{name}.weight": module._weight_quantizer(module.weight).detach().float().contiguous()
        for name, module in model.named_modules()
        if getattr(module, "_weight_quantizer", None) is not None
    }
    with torch.no_grad():
        export_safetensors(model, str(directory))
    save_file(expected, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
