"""Heads of a 4-bit cache times a Hadamard matrix: queries, keys and values behind their rotation, results back again.

Keys and values then go into the cache as codes. The numbers are those of kernels/kv_cache.py; a page of either is
[kv_heads, bytes].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import BLOCK_SIZE, Attention, RopeKV
from qserve.kernels.triton.launch import at

TOKENS = 4
"""Tokens of one program."""


@triton.jit
def _signs(dims):
    """Those of Rudin and Shapiro: -1 where an odd number of neighbouring bits are both set."""
    both = dims & (dims >> 1)
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def _butterfly(x, STEP: tl.constexpr):
    """The sums and the differences of numbers that lie STEP apart."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, (ROWS * WIDTH // (2 * STEP), 2, STEP)), (0, 2, 1))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, WIDTH))


@triton.jit
def _butterflies(x, TURNS: tl.constexpr):
    """The columns of x times the Hadamard matrix of 2 ** TURNS numbers, part by part."""
    for turn in tl.static_range(TURNS):
        x = _butterfly(x, 1 << turn)
    return x * (1.0 / tl.sqrt(1.0 * (1 << TURNS)))


@triton.jit
def _codes(x, low, step):
    magic: tl.constexpr = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, ties to even
    scaled = tl.where(step > 0, tl.div_rn(x - low, tl.where(step > 0, step, 1.0) + tl.zeros_like(x)), 0.0)
    return ((tl.minimum(tl.maximum(scaled, 0.0), 15.0) + magic) - magic).to(tl.int32)


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    qkv_ptr, k_ptr, v_ptr, slots_ptr, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TURNS: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Turns every head in place, and writes those of keys and values to their slots; none below 0."""
    HALF: tl.constexpr = DIM // 2
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    real = rows < tokens
    inside = real[:, None] & (dims < DIM)[None, :]
    head_ptr = qkv_ptr + rows.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    x = tl.load(head_ptr + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    x = _butterflies(x * _signs(dims)[None, :], TURNS)
    tl.store(head_ptr + dims[None, :], x.to(qkv_ptr.dtype.element_ty), mask=inside)
    if head >= HEADS:
        tl.debug_barrier()  # a thread reads what another has written
        halves = tl.arange(0, BLOCK_DIM // 2)
        paired = real[:, None] & (halves < HALF)[None, :]
        first = tl.load(head_ptr + halves[None, :], mask=paired, other=0.0).to(tl.float32)
        second = tl.load(head_ptr + HALF + halves[None, :], mask=paired, other=0.0).to(tl.float32)
        least = tl.where(paired, tl.minimum(first, second), float("inf"))
        most = tl.where(paired, tl.maximum(first, second), float("-inf"))
        low16 = tl.min(least, 1).to(tl.float16)
        step16 = tl.div_rn(tl.max(most, 1) - tl.min(least, 1), tl.full([TOKENS], 15.0, tl.float32)).to(tl.float16)
        finite = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
        held = tl.min(finite.to(tl.int32), 1) == 1
        low, step = low16.to(tl.float32), step16.to(tl.float32)
        held = held & (tl.abs(low) < float("inf")) & (tl.abs(step) < float("inf"))
        codes = _codes(first, low[:, None], step[:, None]) | (_codes(second, low[:, None], step[:, None]) << 4)
        kv_head = (head - HEADS) % KV_HEADS
        slots = tl.load(slots_ptr + rows, mask=real, other=-1).to(tl.int64)
        stored = real & (slots >= 0)
        page = (slots // PAGE * KV_HEADS + kv_head) * (PAGE * (HALF + 4))
        offset = slots % PAGE
        cache_ptr = k_ptr
        first_at, stride = offset, PAGE
        if head >= HEADS + KV_HEADS:
            cache_ptr = v_ptr
            first_at, stride = offset * HALF, 1
        places = (page + first_at)[:, None] + halves[None, :] * stride
        tl.store(cache_ptr + places, codes.to(tl.uint8), mask=stored[:, None] & (halves < HALF)[None, :])
        scales_ptr = cache_ptr.to(tl.pointer_type(tl.float16), bitcast=True) + page // 2 + PAGE * HALF // 2 + offset
        tl.store(scales_ptr, tl.where(held, step, float("nan")).to(tl.float16), mask=stored)
        tl.store(scales_ptr + PAGE, tl.where(held, low, float("nan")).to(tl.float16), mask=stored)


@triton.jit(do_not_specialize=["tokens"])
def turn_back_kernel(
    out_ptr, tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TURNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, BLOCK_DIM)
    inside = (rows < tokens)[:, None] & (dims < DIM)[None, :]
    places = out_ptr + rows.to(tl.int64)[:, None] * (HEADS * DIM) + tl.program_id(1) * DIM + dims[None, :]
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    x = _butterflies(x, TURNS) * _signs(dims)[None, :]
    tl.store(places, x.to(out_ptr.dtype.element_ty), mask=inside)


def head_constants(op: RopeKV | Attention) -> dict[str, int]:
    """The constants of a head, for both kernels."""
    turns = (op.head_dim & -op.head_dim).bit_length() - 1
    return {
        "HEADS": op.heads, "DIM": op.head_dim, "BLOCK_DIM": triton.next_power_of_2(op.head_dim), "TURNS": turns,
        "TOKENS": TOKENS,
    }  # fmt: skip


def store(op: RopeKV, slots: Tensor, tokens: int) -> None:
    """What is left of ``op`` for the first ``tokens`` rows, whose heads are rotated by position."""
    at(store_kernel, (triton.cdiv(tokens, TOKENS), op.heads + 2 * op.kv_heads))(
        op.qkv, op.k_cache, op.v_cache, slots, tokens, **head_constants(op), KV_HEADS=op.kv_heads, PAGE=BLOCK_SIZE,
        num_warps=1,
    )  # fmt: skip


def turn_back(op: Attention, tokens: int) -> None:
    """The results of the first ``tokens`` rows, as they are without the matrix."""
    at(turn_back_kernel, (triton.cdiv(tokens, TOKENS), op.heads))(op.out, tokens, **head_constants(op), num_warps=1)
