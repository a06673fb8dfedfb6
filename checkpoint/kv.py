"""Reads the scales of a quantized KV cache and the centre of its keys, stored as plain tensors beside the attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from qserve.checkpoint.source import ModelSource


KEY_CENTER = "k_center"


def is_kv(name: str) -> bool:
    """Whether the tensor ``name`` describes a KV cache, not a weight."""
    return name.endswith((".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale", f".{KEY_CENTER}"))


def key_center(source: ModelSource, attention_module: str) -> Tensor | None:
    """float32 [kv_heads, head_dim], which ``attention_module`` subtracts from every rotated key it caches, or None.

    Raises ``CheckpointError`` where it is not finite.
    """
    name = f"{attention_module}.{KEY_CENTER}"
    if not source.has(name):
        return None
    center = source.tensor(name).to(torch.float32)
    if center.dim() != 2 or not bool(torch.isfinite(center).all()):
        raise CheckpointError(f"{source.path}: {name} is no finite tensor of [kv_heads, head_dim]")
    return center


def kv_scales(source: ModelSource, attention_module: str) -> tuple[Tensor, Tensor] | None:
    """(k, v): float32 [1] or [kv_heads] each, for ``attention_module`` (``model.layers.0.self_attn``), or None.

    Three names are read: ``self_attn.k_scale`` of compressed-tensors, ``self_attn.k_proj.k_scale`` of ModelOpt and
    ``self_attn.k_proj.output_scale`` of Quark.
    Raises ``CheckpointError`` where one of the two is missing, or a scale is not positive and finite.
    """
    found: list[Tensor] = []
    missing: list[str] = []
    for letter in ("k", "v"):
        proj = f"{attention_module}.{letter}_proj"
        names = [f"{attention_module}.{letter}_scale", f"{proj}.{letter}_scale", f"{proj}.output_scale"]
        name = next((name for name in names if source.has(name)), None)
        if name is None:
            missing.append(names[0])
            continue
        scale = source.tensor(name).to(torch.float32).reshape(-1)
        if not bool((scale > 0).all() and torch.isfinite(scale).all()) or not len(scale):
            raise CheckpointError(f"{source.path}: {name} holds a scale that is not positive and finite")
        found.append(scale)
    if missing and found:
        raise CheckpointError(f"{source.path} lacks {missing[0]}, though the other of the two scales is there")
    return None if missing else (found[0], found[1])
