"""transformers loads the checkpoint in DIR by ``from_pretrained``, in float32, as it is and told to dequantize at once.

Writes to ``out.safetensors`` the logits of each way that works, ``plain`` and ``dequantize``: with no weight missing or
of another size. Scales that a way has no use for may be left out. Why a way does not work goes to ``WAY.txt``.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from llama import TOKENS, run_jobs, to_float32
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

WAYS = {"plain": {}, "dequantize": {"quantization_config": CompressedTensorsConfig(dequantize=True)}}
UNUSED = ("k_scale", "v_scale", "input_scale", "input_global_scale")


@torch.no_grad()
def logits(directory: Path, **options: object) -> Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
    )
    lost = [*info["missing_keys"], *info["mismatched_keys"]]
    lost += [name for name in info["unexpected_keys"] if not name.endswith(UNUSED)]
    assert not lost, lost
    to_float32(model)
    found: Tensor = model(TOKENS).logits
    return found.float().contiguous()


def main(directory: Path) -> None:
    found = {}
    for way, options in WAYS.items():
        try:
            found[way] = logits(directory, **options)
        except Exception:
            (directory / f"{way}.txt").write_text(traceback.format_exc(), encoding="utf-8")
    save_file(found, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
