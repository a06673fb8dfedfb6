"""transformers reads: loads the checkpoint in DIR by ``from_pretrained``, in float32; ``dequantize``
means at once.

Writes to ``out.safetensors`` the logits, the scales of the KV cache, and the weight of each linear in the blocks, after
the first forward pass, on which compressed-tensors decompresses otherwise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from llama import block_linears, kv_scales, run_jobs, save_answers, to_float32
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


@torch.no_grad()
def main(directory: Path, dequantize: bool = False) -> None:
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], f"{kind}: {sorted(info[kind])}"
    to_float32(model)
    model(torch.tensor([[1, 2]]))
    weights = {f"{name}.weight": linear.weight.float().contiguous() for name, linear in block_linears(model).items()}
    save_answers(directory, model, weights | kv_scales(model))


if __name__ == "__main__":
    run_jobs(main)
