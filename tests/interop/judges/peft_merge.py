"""PEFT makes an adapter of the llama in BASE, with random numbers, and saves it in DIR.

Writes to ``out.safetensors`` the logits of the model with the adapter merged, in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llama import TOKENS, run_jobs
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaForCausalLM


@torch.no_grad()
def main(directory: Path, base: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # it starts as zeros
            parameter.normal_(0, 0.1)
    adapted.save_pretrained(directory)
    merged: Any = adapted.merge_and_unload()
    save_file({"logits": merged(TOKENS).logits.contiguous()}, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
