"""bitsandbytes quantizes a random weight, writes it as transformers does, and what it makes of it itself."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes as bnb
import bitsandbytes.functional as functional
import torch
from llama import run_jobs
from safetensors.torch import save_file


def main(directory: Path, module: str, kind: str, nested: bool) -> None:
    """``kind``: nf4, fp4 or int8."""
    torch.manual_seed(0)
    weight = torch.randn(192, 128).bfloat16()
    if kind == "int8":
        linear = bnb.nn.Linear8bitLt(128, 192, bias=False, has_fp16_weights=False)
        linear.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
        parts = {f"{module}.{name}": tensor for name, tensor in linear.to("cpu").state_dict().items()}
        found = functional.int8_vectorwise_dequant(parts[f"{module}.weight"], parts[f"{module}.SCB"])
    else:
        packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        parts = {f"{module}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        parts[f"{module}.weight"], found = packed, functional.dequantize_4bit(packed, state).contiguous()
    save_file(parts, directory / "model.safetensors", {"format": "pt"})
    save_file({"weight": found}, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
