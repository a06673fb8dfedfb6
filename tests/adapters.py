"""Adapters in PEFT's layout, as ``peft.save_pretrained`` writes them, with random matrices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qserve.checkpoint.lora import LoraAdapter, LoraWeight

CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "r": 8, "lora_alpha": 16,
    "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "target_modules": ["q_proj"], "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False,
    "use_rslora": False, "lora_bias": False, "target_parameters": None, "layer_replication": None,
}  # fmt: skip


def random_adapter(shapes: Mapping[str, tuple[int, int]], rank: int = 8, size: float = 0.2) -> LoraAdapter:
    """One of all linears ``shapes``, [out, in], in memory."""
    g = torch.Generator().manual_seed(rank)
    modules = {
        name: LoraWeight(size * torch.randn(rank, inp, generator=g), size * torch.randn(out, rank, generator=g), 0.5)
        for name, (out, inp) in sorted(shapes.items())
    }
    return LoraAdapter(Path("random"), "", modules)


def write_adapter(
    path: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.1,
    **config: Any,
) -> Path:
    """An adapter of the linears ``shapes``, [out, in]. ``ranks``: of linears with another rank than ``r``; ``size``:
    the standard deviation of its numbers."""
    g = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    content = CONFIG | config
    tensors = {}
    for module, (out, inp) in shapes.items():
        rank = (ranks or {}).get(module, content["r"])
        for matrix, shape in (("A", (rank, inp)), ("B", (out, rank))):
            numbers = size * torch.randn(shape, generator=g)
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = numbers.to(dtype)
    (path / "adapter_config.json").write_text(json.dumps(content, indent=2))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path
