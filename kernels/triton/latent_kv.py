"""Latents normed into the paged cache, each with its rotated key, and queries rotated: ``ops.LatentKV``.

One program for the latents of four tokens, or for one head of their queries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import LatentKV
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.rope_kv import TOKENS


@triton.jit(do_not_specialize=["tokens"])
def latent_kv_kernel(
    kv_ptr, norm_ptr, q_ptr, out_ptr, cosine_ptr, sine_ptr, cache_ptr, positions_ptr, slots_ptr, tokens, eps,
    q_stride, q_head, out_stride, out_head,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """HALF pairs are rotated: elements j and j + HALF. Program 0 of four tokens has their latents."""
    WIDTH: tl.constexpr = RANK + 2 * HALF
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    real = rows < tokens
    pairs = tl.arange(0, BLOCK_HALF)
    inside = real[:, None] & (pairs < HALF)[None, :]
    turn = tl.load(positions_ptr + rows, mask=real, other=0)[:, None] * HALF + pairs[None, :]
    cosine = tl.load(cosine_ptr + turn, mask=inside, other=1.0)
    sine = tl.load(sine_ptr + turn, mask=inside, other=0.0)
    rows = rows.to(tl.int64)
    if part == 0:
        dims = tl.arange(0, BLOCK_RANK)
        known = real[:, None] & (dims < RANK)[None, :]
        x = tl.load(kv_ptr + rows[:, None] * WIDTH + dims[None, :], mask=known, other=0.0)
        weight = tl.load(norm_ptr + dims, mask=dims < RANK, other=0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / RANK + eps)[:, None] * weight[None, :]
        key = kv_ptr + rows[:, None] * WIDTH + RANK + pairs[None, :]
        first = tl.load(key, mask=inside, other=0.0)
        second = tl.load(key + HALF, mask=inside, other=0.0)
        slots = tl.load(slots_ptr + rows, mask=real, other=-1).to(tl.int64)
        stored = (slots >= 0)[:, None]
        cell = cache_ptr + slots[:, None] * WIDTH
        tl.store(cell + dims[None, :], x.to(cache_ptr.dtype.element_ty), mask=stored & known)
        cell += RANK + pairs[None, :]
        tl.store(cell, (first * cosine - second * sine).to(cache_ptr.dtype.element_ty), mask=stored & inside)
        tl.store(cell + HALF, (second * cosine + first * sine).to(cache_ptr.dtype.element_ty), mask=stored & inside)
    else:
        q = q_ptr + rows[:, None] * q_stride + (part - 1) * q_head + pairs[None, :]
        first = tl.load(q, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(q + HALF, mask=inside, other=0.0).to(tl.float32)
        out = out_ptr + rows[:, None] * out_stride + (part - 1) * out_head + pairs[None, :]
        tl.store(out, (first * cosine - second * sine).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out + HALF, (second * cosine + first * sine).to(out_ptr.dtype.element_ty), mask=inside)


def latent_kv(op: LatentKV, positions: Tensor, slots: Tensor, tokens: int) -> None:
    """``op`` for the first ``tokens`` rows. A slot below 0 is not written: the row is padding."""
    half = op.rope // 2
    at(latent_kv_kernel, (triton.cdiv(tokens, TOKENS), op.heads + 1))(
        op.kv, op.norm, op.q, op.out, op.cosine, op.sine, op.cache, positions, slots, tokens, op.eps,
        op.q_stride, op.q_head, op.out_stride, op.out_head,
        op.rank, half, triton.next_power_of_2(op.rank), triton.next_power_of_2(half), TOKENS, num_warps=1,
    )  # fmt: skip
