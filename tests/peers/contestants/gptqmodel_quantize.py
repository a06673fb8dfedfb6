"""GPTQModel: ``gptqmodel_quantize.py MODEL WINDOWS OUT BITS``, in bfloat16 and with its defaults otherwise."""

from __future__ import annotations

import sys

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file

model_path, windows_path, out, bits = sys.argv[1:]
windows = load_file(windows_path)["windows"]
config = QuantizeConfig(bits=int(bits), group_size=64, sym=True)
model = GPTQModel.load(model_path, config, dtype=torch.bfloat16, device="cpu")
samples = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in windows]
model.quantize(samples, batch_size=1)
model.save(out)
