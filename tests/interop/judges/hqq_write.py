"""hqq quantizes random weights, writes them as transformers or as itself does, and what it makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from llama import run_jobs
from safetensors.torch import save_file
from torch import nn
from transformers import HqqConfig, LlamaConfig, LlamaForCausalLM


def main(
    directory: Path, layout: str, module: str, bits: int, group_size: int | None, dtype: str, view_as_float: bool
) -> None:
    """``layout``: "transformers", a linear called ``module``; or "hqq", a model with one of that name."""
    torch.manual_seed(0)
    settings = {"nbits": bits, "group_size": group_size, "view_as_float": view_as_float, "axis": 1}
    computes = getattr(torch, dtype)
    if layout == "hqq":
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, mlp_bias=True,
        )).to(computes)  # fmt: skip
        AutoHQQHFModel.quantize_model(model, BaseQuantizeConfig(**settings), compute_dtype=computes, device="cpu")
        AutoHQQHFModel.save_to_safetensors(model, str(directory))
        linear = model.get_submodule(module)
    else:
        linear = HQQLinear(nn.Linear(256, 128), BaseQuantizeConfig(**settings), compute_dtype=computes, device="cpu")
        parts = {f"{module}.{name}": tensor.contiguous() for name, tensor in linear.state_dict().items()}
        save_file(parts, directory / "model.safetensors", {"format": "pt"})
        config = {"model_type": "llama", "quantization_config": HqqConfig(**settings).to_dict()}
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert isinstance(linear, HQQLinear)
    save_file({"weight": linear.dequantize().contiguous(), "bias": linear.bias}, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
