"""Rotation of queries and keys in place, and keys and values into the paged cache: one program per head of four tokens.

The numbers are those of ``ops.RopeKV``. Pages here hold keys token by token, like values: [blocks, kv_heads, 16,
head_dim] (``Placement.keys_by_token``). Every element is read and written by one thread, so that rotating in place
needs no barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import BLOCK_SIZE, RopeKV
from qserve.kernels.triton.launch import at

TOKENS = 4
"""Tokens of one program: a constant, so that the sums of a norm have one order."""
_ENCODINGS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}
"""How numbers are cached, where not as they are; 3: ``packed_kv`` does it."""


@triton.jit
def _e4m3(x):
    """The code of a float32, rounded half to even and saturated. Integer arithmetic: compilers and GPUs differ here."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    magic: tl.constexpr = 24576.0  # 1.5 * 2**14: adding it rounds to multiples of 2**-9
    small = (((size + magic) - magic) * 512.0).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x < 0, code | 0x80, code)
    return tl.where(x == x, code, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _encode(x, scale, ENCODING: tl.constexpr):
    """float32 as the cache stores it: rounded half to even, saturated, NaN for what is not finite."""
    if ENCODING == 0:
        return x
    else:  # code after a return would be compiled too
        finite = tl.abs(x) < float("inf")
        scaled = tl.div_rn(x, scale + tl.zeros_like(x))
        if ENCODING == 1:
            magic: tl.constexpr = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, ties to even
            rounded = (tl.minimum(tl.maximum(scaled, -127.0), 127.0) + magic) - magic
            return tl.where(finite, rounded, -128.0)
        else:
            return _e4m3(tl.where(finite, scaled, float("nan")))


@triton.jit(do_not_specialize=["tokens"])
def rope_kv_kernel(
    qkv_ptr, cosine_ptr, sine_ptr, q_norm_ptr, k_norm_ptr, k_center_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    k_cache_ptr, v_cache_ptr, positions_ptr, slots_ptr, tokens, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, BLOCK_HALF: tl.constexpr,
    ENCODING: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TURNED pairs of a head are rotated: elements j and j + TURNED. The elements behind them are paired too."""
    HALF: tl.constexpr = DIM // 2
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    real = rows < tokens
    pairs = tl.arange(0, BLOCK_HALF)
    paired = pairs < HALF
    inside = real[:, None] & paired[None, :]
    one, other = pairs, HALF + pairs
    if TURNED < HALF:
        one = tl.where(pairs < TURNED, pairs, TURNED + pairs)
        other = tl.where(pairs < TURNED, TURNED + pairs, HALF + pairs)
    head_ptr = qkv_ptr + rows.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    first = tl.load(head_ptr + one[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(head_ptr + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if q_norm_ptr is not None:
            norm_ptr = q_norm_ptr
            if head >= HEADS:
                norm_ptr = k_norm_ptr
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            inverse = tl.rsqrt(squares / DIM + eps)[:, None]
            first *= inverse * tl.load(norm_ptr + one, mask=paired, other=0.0)[None, :]
            second *= inverse * tl.load(norm_ptr + other, mask=paired, other=0.0)[None, :]
        position = tl.load(positions_ptr + rows, mask=real, other=0)
        if TURNED > 0:
            turn = position[:, None] * TURNED + pairs[None, :]
            has_angle = real[:, None] & (pairs < TURNED)[None, :]
            cosine = tl.load(cosine_ptr + turn, mask=has_angle, other=1.0)
            sine = tl.load(sine_ptr + turn, mask=has_angle, other=0.0)
            turned = first * cosine - second * sine
            second = second * cosine + first * sine
            first = turned
        if q_scale_ptr is not None:  # noqa: SIM102 (as below)
            if head < HEADS:
                scale = tl.load(q_scale_ptr + position)[:, None]
                first *= scale
                second *= scale
        if k_center_ptr is not None:  # noqa: SIM102 (known to the compiler; the other is not)
            if head >= HEADS:
                center = k_center_ptr + (head - HEADS) * DIM
                first -= tl.load(center + one, mask=paired, other=0.0)[None, :]
                second -= tl.load(center + other, mask=paired, other=0.0)[None, :]
        tl.store(head_ptr + one[None, :], first.to(qkv_ptr.dtype.element_ty), mask=inside)
        tl.store(head_ptr + other[None, :], second.to(qkv_ptr.dtype.element_ty), mask=inside)
    if ENCODING < 3 and head >= HEADS:
        kv_head = (head - HEADS) % KV_HEADS
        cache_ptr, scale_ptr = k_cache_ptr, k_scale_ptr
        if head >= HEADS + KV_HEADS:
            cache_ptr, scale_ptr = v_cache_ptr, v_scale_ptr
        kv_scale = 1.0
        if ENCODING:
            kv_scale = tl.load(scale_ptr + kv_head)
        slots = tl.load(slots_ptr + rows, mask=real, other=-1).to(tl.int64)
        stored = (slots >= 0)[:, None] & paired[None, :]
        page = (slots // PAGE * KV_HEADS + kv_head) * PAGE + slots % PAGE
        out = cache_ptr + page[:, None] * DIM
        tl.store(out + one[None, :], _encode(first, kv_scale, ENCODING).to(cache_ptr.dtype.element_ty), mask=stored)
        tl.store(out + other[None, :], _encode(second, kv_scale, ENCODING).to(cache_ptr.dtype.element_ty), mask=stored)


def rope_kv(op: RopeKV, positions: Tensor, slots: Tensor, tokens: int) -> None:
    """``op`` for the first ``tokens`` rows. A slot below 0 is not written: the row is padding."""
    at(rope_kv_kernel, (triton.cdiv(tokens, TOKENS), op.heads + 2 * op.kv_heads))(
        op.qkv, op.cosine, op.sine, op.q_norm, op.k_norm, op.k_center, op.q_scale, op.k_scale, op.v_scale,
        op.k_cache, op.v_cache, positions, slots, tokens, op.eps,
        op.heads, op.kv_heads, op.head_dim, op.rotary_dim // 2, triton.next_power_of_2(op.head_dim // 2),
        _ENCODINGS.get(op.k_cache.dtype, 0), BLOCK_SIZE, TOKENS, num_warps=1,
    )  # fmt: skip
