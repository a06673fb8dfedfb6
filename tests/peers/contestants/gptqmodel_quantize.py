"""GPTQModel: ``gptqmodel_quantize.py MODEL WINDOWS OUT BITS RECIPE``, in bfloat16.

RECIPE is default, or what its authors offer beyond: mse, which searches each scale for the least error of this power;
gptaq, which also follows the float model; or mse+gptaq.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file

model_path, windows_path, out, bits, recipe = sys.argv[1:]
windows = load_file(windows_path)["windows"]
more: dict[str, Any] = {"desc_act": True} if recipe != "default" else {}
if "mse" in recipe:
    more["mse"] = 2.4
if "gptaq" in recipe:
    more["gptaq"] = {}
config = QuantizeConfig(bits=int(bits), group_size=64, sym=True, **more)
model = GPTQModel.load(model_path, config, dtype=torch.bfloat16, device="cpu")
samples = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in windows]
model.quantize(samples, batch_size=1)
model.save(out)
