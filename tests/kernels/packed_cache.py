"""Caches of 4 bits with given numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.kernels.kv_cache import decode_packed, encode_packed, head_numel, packed_parts, stored_as
from qserve.kernels.ops import PACKED_KV


def packed(numbers: Tensor, *, keys: bool) -> Tensor:
    """A cache of keys, or of values, that holds turned float32 ``numbers`` [blocks, kv_heads, 16, head_dim]."""
    *pages, _, dim = numbers.shape
    cache = torch.empty(*pages, head_numel(PACKED_KV, dim), dtype=stored_as(PACKED_KV))
    for part, found in zip(packed_parts(cache, dim, keys=keys), encode_packed(numbers)):
        part.copy_(found)
    return cache


def unpacked(cache: Tensor, dim: int, *, keys: bool) -> tuple[Tensor, Tensor]:
    """The numbers [blocks, kv_heads, 16, head_dim] in ``cache``, and the steps [blocks, kv_heads, 16, 1]."""
    parts = packed_parts(cache, dim, keys=keys)
    return decode_packed(*parts), parts[1].float()[..., None]
