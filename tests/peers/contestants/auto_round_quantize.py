"""AutoRound: ``auto_round_quantize.py MODEL WINDOWS OUT BITS RECIPE``, with 8 samples in an iteration.

RECIPE is default, 200 iterations, or best, the 1,000 of its recipe of that name. Both see the same windows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path, windows_path, out, bits, recipe = sys.argv[1:]
windows = load_file(windows_path)["windows"]
samples, length = windows.shape
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
rounding = AutoRound(
    model, AutoTokenizer.from_pretrained(model_path), bits=int(bits), group_size=64, sym=True,
    iters={"default": 200, "best": 1000}[recipe], seqlen=length, nsamples=samples, batch_size=8,
    dataset=list(windows.split(8)), device_map="cpu",
)  # fmt: skip
rounding.quantize_and_save(out, format="auto_gptq")
(folder,) = Path(out).iterdir()  # one of its own naming
for file in folder.iterdir():
    file.rename(Path(out) / file.name)
folder.rmdir()
