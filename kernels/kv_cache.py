"""How keys and values lie in the blocks of the paged cache, and in torch what kernels do for a cache of 4 bits.

That cache (vLLM's int4_per_token_head) needs nothing of the checkpoint: each token has a step and a low for the key and
for the value of each head. A Hadamard matrix first spreads what is large in a few channels over all of them, as in
QuaRot (arXiv 2404.00456). Queries are turned alike, so scores stay as they are, and results are turned back.
"""

from __future__ import annotations

from functools import cache
from math import sqrt

import torch
from torch import Tensor

from qserve.kernels.ops import BLOCK_SIZE, PACKED_KV

_LEVELS = 15
_SCALES = 4  # bytes of a token's step and low, float16 each
PACKED_HEADS = 32
"""Heads of a 4-bit cache are a multiple of it: each half fills a vector of codes."""


def stored_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor that holds a cache of ``dtype``."""
    return torch.uint8 if dtype == PACKED_KV else dtype


def head_numel(dtype: torch.dtype, head_dim: int) -> int:
    """Elements of ``stored_as(dtype)`` that the keys, or the values, of a head take in a block."""
    return BLOCK_SIZE * (head_dim // 2 + _SCALES if dtype == PACKED_KV else head_dim)


def hadamard(x: Tensor) -> Tensor:
    """float32 [..., head_dim] with other signs, times a Hadamard matrix: what is large in a few channels is spread over
    the head. The matrix is of the greatest power of two that divides head_dim, for each such part."""
    return _butterflies(x * _signs(x.shape[-1]).to(x.device))


def inverse_hadamard(x: Tensor) -> Tensor:
    """float32 [..., head_dim]: the inverse of ``hadamard``."""
    return _butterflies(x) * _signs(x.shape[-1]).to(x.device)


@cache
def _signs(head_dim: int) -> Tensor:
    """Of Rudin and Shapiro: their own transform is flat, so what all channels share comes into no single one."""
    return torch.tensor([-1.0 if (j & j >> 1).bit_count() & 1 else 1.0 for j in range(head_dim)])


def _butterflies(x: Tensor) -> Tensor:
    shape, part = x.shape, x.shape[-1] & -x.shape[-1]
    step = 1
    while step < part:
        first, second = x.reshape(*shape[:-1], -1, 2, step).unbind(-2)
        x = torch.stack([first + second, first - second], -2)
        step *= 2
    return x.reshape(shape) * torch.tensor(1 / sqrt(part), dtype=torch.float32)


def encode_packed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turned float32 [..., head_dim] as codes uint8 [..., head_dim / 2], and float16 steps and lows [...].

    A number is low + step * code. Element j is in the lower half of byte j, element head_dim / 2 + j in the upper. What
    is not finite, or beyond float16, makes all of its token and head NaN.
    """
    low, high = x.aminmax(dim=-1)
    step, low = ((high - low) / _LEVELS).half(), low.half()
    unheld = ~(x.isfinite().all(-1) & step.isfinite() & low.isfinite())
    step, low = step.masked_fill(unheld, torch.nan), low.masked_fill(unheld, torch.nan)
    divisor = step.float().nan_to_num(0.0)[..., None]
    codes = torch.where(divisor > 0, (x - low.float()[..., None]) / divisor, 0.0).clamp(0, _LEVELS).round().byte()
    first, second = codes.unflatten(-1, (2, -1)).unbind(-2)
    return first | second << 4, step, low


def decode_packed(codes: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """float32 [..., head_dim]: the inverse of ``encode_packed``, still turned."""
    return torch.cat([codes & 15, codes >> 4], -1).float() * step.float()[..., None] + low.float()[..., None]


def packed_parts(cache: Tensor, head_dim: int, *, keys: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the keys, or the values, of a 4-bit cache [blocks, kv_heads, ``head_numel``]: codes [blocks, kv_heads,
    16, head_dim / 2], steps and lows [blocks, kv_heads, 16]."""
    half = head_dim // 2
    codes = cache[..., : half * BLOCK_SIZE]
    codes = codes.unflatten(-1, (half, BLOCK_SIZE)).mT if keys else codes.unflatten(-1, (BLOCK_SIZE, half))
    steps, lows = cache[..., half * BLOCK_SIZE :].view(torch.float16).unflatten(-1, (2, BLOCK_SIZE)).unbind(-2)
    return codes, steps, lows
