"""llm-compressor: ``llm_compressor_quantize.py MODEL WINDOWS OUT SCHEME RECIPE``, in bfloat16.

SCHEME is one of its presets, NVFP4, NVFP4A16 or MXFP4A16. RECIPE is default, that of its examples for these, which
rounds to nearest; gptq; or gptq+mse, which also searches each scale for the least error.
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path, windows_path, out, scheme, recipe = sys.argv[1:]
windows = load_file(windows_path)["windows"]
samples, length = windows.shape
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
chosen = QuantizationModifier if recipe == "default" else GPTQModifier
more = {"weight_observer": "mse"} if "mse" in recipe else {}
modifier = chosen(targets="Linear", scheme=scheme, ignore=["lm_head"], **more)
dataset = Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})
oneshot(model=model, dataset=dataset, recipe=modifier, max_seq_length=length, num_calibration_samples=samples)
model.save_pretrained(out, save_compressed=True)
AutoTokenizer.from_pretrained(model_path).save_pretrained(out)
