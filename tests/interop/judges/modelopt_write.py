"""ModelOpt quantizes a tiny llama, exports it, and says what its own quantizers make of the weights."""

from __future__ import annotations

from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from llama import run_jobs
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK = 16


def main(directory: Path, config: str) -> None:
    """``config``: the name of one of ModelOpt's, or "NVFP4". That is rounded on GPUs alone: here its tensors are made
    by the same package, and take the place of those of fp8."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    ))  # fmt: skip
    tokens = torch.randint(3, 96, (4, 32))
    settings = getattr(mtq, "FP8_DEFAULT_CFG" if config == "NVFP4" else config)
    mtq.quantize(model, settings, lambda model: model(tokens))
    expected = {
        f"{name}.weight": module.weight_quantizer(module.weight).detach().contiguous()
        for name, module in model.named_modules()
        if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled
    }
    dense = {name: model.get_parameter(name).detach().clone() for name in expected}
    export_hf_checkpoint(model, export_dir=str(directory))
    if config == "NVFP4":
        stored = load_file(directory / "model.safetensors")
        for name in expected:
            packed, scales, scale = NVFP4QTensor.quantize(dense[name], BLOCK)
            stored |= {name: packed._quantized_data, f"{name}_scale": scales, f"{name}_scale_2": scale}
            said = {"scale": scales, "double_scale": scale, "block_sizes": {-1: BLOCK}}
            expected[name] = packed.dequantize(dtype=torch.float32, **said)
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
        for file in ("config.json", "hf_quant_config.json"):
            text = (directory / file).read_text(encoding="utf-8")
            (directory / file).write_text(text.replace('"FP8"', '"NVFP4"'), encoding="utf-8")
    save_file(expected, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
