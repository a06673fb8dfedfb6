"""The element type of the KV cache and its scales, as the user or the checkpoint asks."""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.kv import key_center, kv_scales
from qserve.checkpoint.source import ModelSource
from qserve.kernels.kv_cache import PACKED_HEADS
from qserve.kernels.ops import PACKED_KV, SCALED_KV

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4_per_token_head": PACKED_KV,
}


def cache_dtype(option: str, source: ModelSource) -> torch.dtype:
    """The dtype for ``--kv-cache-dtype option``; ``auto`` is what the checkpoint says, float16 where it says nothing.

    Raises ``UsageError`` for int8 where the checkpoint holds no scales made for it.
    """
    calibrated = source.spec.kv_cache if source.spec is not None else None
    if option == "auto":
        option = "fp16" if calibrated is None else calibrated.dtype
    elif option == "int8" and (calibrated is None or calibrated.dtype != "int8"):
        raise UsageError(
            f"{source.name} has no scales for an int8 KV cache: quantize it with --kv-cache int8, "
            "or serve it with --kv-cache-dtype fp8"
        )
    return _DTYPES[option]


def require_packed_heads(head_dim: int, name: str) -> None:
    """Raises ``UsageError`` where heads of ``head_dim`` do not fit a cache of 4 bits."""
    if head_dim % PACKED_HEADS:
        raise UsageError(f"{name} has heads of {head_dim}; a KV cache in int4_per_token_head takes multiples of "
                         f"{PACKED_HEADS}: choose fp8")


def cache_scales(
    source: ModelSource, attention: str, kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """(k_scale, v_scale) float32 [kv_heads] of the layer whose attention is the module ``attention``; None for a float
    cache. An e4m3 cache that was not calibrated for e4m3 has the scale 1, as vLLM has it.

    Raises ``CheckpointError`` where int8 scales are missing, or their number is neither one nor ``kv_heads``.
    """
    if dtype not in SCALED_KV:
        return None, None
    calibrated = source.spec.kv_cache if source.spec is not None else None
    stored = None
    if calibrated is None or _DTYPES[calibrated.dtype] == dtype:
        stored = kv_scales(source, attention)
    if stored is None:
        if dtype == torch.int8:
            raise CheckpointError(f"{source.name}: {attention} has no scales for its int8 KV cache")
        return torch.ones(kv_heads), torch.ones(kv_heads)
    for scale in stored:
        if scale.numel() not in (1, kv_heads):
            raise CheckpointError(
                f"{source.name}: {attention} has {scale.numel()} KV scales for {kv_heads} KV heads"
            )
    k, v = (scale.float().reshape(-1).expand(kv_heads).contiguous() for scale in stored)
    return k, v


def cache_center(
    source: ModelSource, attention: str, kv_heads: int, head_dim: int, dtype: torch.dtype, *, shift_matters: bool
) -> Tensor | None:
    """float32 [kv_heads, head_dim], which the module ``attention`` subtracts from its keys. None for a float cache, and
    where the checkpoint has none. ``shift_matters``: scores have a cap or sinks, so nothing may be subtracted.

    Raises ``CheckpointError`` where its shape is another, and where scales were made for keys less a centre that may
    not be subtracted.
    """
    center = key_center(source, attention) if dtype in (*SCALED_KV, PACKED_KV) else None
    if center is not None and shift_matters:
        if dtype == torch.int8 and bool(center.any()):
            raise CheckpointError(f"{source.name}: {attention} has int8 scales for centred keys, but its scores have a "
                                  "cap or sinks: quantize the model again, or serve it with --kv-cache-dtype fp16")
        return None
    if center is not None and center.shape != (kv_heads, head_dim):
        raise CheckpointError(
            f"{source.name}: {attention} centres keys of shape {tuple(center.shape)}, not {(kv_heads, head_dim)}"
        )
    return center
