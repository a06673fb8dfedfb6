"""bitsandbytes quantizes a random weight to NF4, writes it as transformers does, and what it makes of it itself."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from llama import run_jobs
from safetensors.torch import save_file


def main(directory: Path, module: str, nested: bool) -> None:
    torch.manual_seed(0)
    packed, state = bnb.quantize_4bit(torch.randn(192, 128).bfloat16(), quant_type="nf4", compress_statistics=nested)
    parts = {f"{module}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    save_file({f"{module}.weight": packed, **parts}, directory / "model.safetensors", {"format": "pt"})
    save_file({"weight": bnb.dequantize_4bit(packed, state).contiguous()}, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
