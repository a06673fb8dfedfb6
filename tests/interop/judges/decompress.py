"""compressed-tensors decompresses: hands the tensors of each module in DIR to its compressor.

The scheme of a module and the compressor come from its own reading of the ``quantization_config``. Writes the weights
to ``out.safetensors``; scales are made float32 first, so that nothing is rounded.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from llama import bare_model, run_jobs
from safetensors.torch import load_file, save_file


def main(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    model = bare_model(directory)
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    stored = load_file(directory / "model.safetensors")
    weights = {}
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        parts = {key.removeprefix(f"{name}."): tensor for key, tensor in stored.items() if key.startswith(f"{name}.")}
        parts["weight_scale"] = parts["weight_scale"].to(torch.float32)
        compressor = BaseCompressor.get_value_from_registry(module.quantization_scheme.format)
        weight = compressor.decompress(parts, module.quantization_scheme)["weight"]
        weights[f"{name}.weight"] = weight.to(torch.float32).contiguous()
    save_file(weights, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
