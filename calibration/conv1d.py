"""GPT-2's ``Conv1D`` as a linear: the same product with the weight turned around."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D


def linears_of_conv1d(model: nn.Module) -> frozenset[str]:
    """Replace every ``Conv1D`` of ``model`` by an ``nn.Linear`` without values. Returns their names."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Conv1D)]
    for name, module in found:
        owner, _, leaf = name.rpartition(".")
        inp, out = module.weight.shape
        linear = nn.Linear(inp, out, device=module.weight.device, dtype=module.weight.dtype)
        setattr(model.get_submodule(owner), leaf, linear)
    return frozenset(name for name, _ in found)
