"""Causal attention over the paged cache: prompts by tiles of queries, decodes by tiles of heads and pieces of keys.

The softmax is computed online (Milakov and Gimelshein, 2018; Dao et al., 2022). The keys of a decode are divided at the
multiples of ``CHUNK``. Its chunks are units of work of their own (Flash-Decoding), folded afterwards in their order.
So the split depends only on the query's own position, and nothing is added by atomics. A tile of a prompt takes its
keys in one go; only the last of them need a mask. In the invariant mode it folds chunks, too, as decodes do.

Decodes run on a fixed number of programs that share out the units, so that one CUDA graph replays at any length. The
query heads of a key head are the rows of one matrix product. Codes of 8 bits become float16, which holds them exactly;
the scale of the keys goes into that of the softmax, the scale of the values into the result.

The matrix unit wants values across keys, but only 16-bit words are transposed on their way to it. Two codes of a key
make such a word, and the even dimensions are multiplied apart from the odd. In a tile with many rows that would cost
more products than it saves. Codes of 4 bits are read as they lie: a byte has an element of either half of a head, and
the halves are multiplied apart. Their numbers are float16 before they are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import BLOCK_SIZE, PACKED_KV, Attention
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.pointwise import tanh
from qserve.kernels.triton.target import Target, takes_ptx

CHUNK = 256
"""Keys of one unit of work: about 2 us of one multiprocessor, and a partial result a thirtieth of the keys' bytes."""
LOG2E = 1.4426950408889634
RESERVED = 1 << 10
"""Bytes of shared memory that the system reserves for each program."""


@dataclass(frozen=True)
class Shape:
    """How a product is cut: ``rows`` of queries and heads, ``keys`` at a time, ``stages`` of keys in flight.
    ``pairs``: values are read as words of two codes of 8 bits. ``folds``: a tile folds its chunks."""

    rows: int
    keys: int
    warps: int
    stages: int
    pairs: bool = False
    folds: bool = False


def tile_shape(op: Attention, gpu: Target, invariant: bool) -> Shape:
    """For prompts: queries of a sequence side by side, by 256 threads. A row that folds has two sums in registers, its
    chunk's and its own, and an older matrix unit has the queries there, too: then there are half as many. So it is for
    a cache of 32 bits, for which shared memory is too small, as it is for more codes beside activations of 32 bits."""
    wide = op.head_dim > 128
    if op.kv_dtype == PACKED_KV:
        return _packed_shape(op, gpu, invariant)
    few = invariant or not {"wgmma", "tcgen05"} & gpu.features or op.k_cache.dtype.itemsize > 2
    rows, keys = (32 if wide else 64) * (1 if few else 2), 32 if wide else 64
    if not few and not wide and op.k_cache.dtype.itemsize == 1 and op.qkv.dtype.itemsize == 2:
        keys = 128  # codes pass through registers: with more of them at a time, products wait less
    group: int = triton.next_power_of_2(op.heads // op.kv_heads)
    return Shape(max(rows, group), keys, 256 // gpu.warp, 2 if few or wide else 3, folds=invariant)


def _packed_shape(op: Attention, gpu: Target, invariant: bool) -> Shape:
    """Codes of 4 bits leave registers for no more: beside them are steps and lows, and two halves of the sums."""
    units = {"wgmma", "tcgen05"} & gpu.features
    rows, keys = 64 if units else 32, 64 if units and not invariant else 32
    if op.head_dim > 128:
        rows, keys = 64 if units and not invariant else 16, 16 if "wgmma" in units and not invariant else 32
    return Shape(rows, keys, 256 // gpu.warp, 2, folds=invariant)


def decode_shape(op: Attention) -> Shape:
    """For decodes: the heads of one query. A matrix unit takes at least 16. Keys and stages were the fastest of ten
    choices on an H200, for four heads of 128 and a cache in 16 bits or e4m3. Other codes, and codes of more rows, have
    no registers for as many keys."""
    rows, size = max(16, triton.next_power_of_2(op.heads // op.kv_heads)), op.k_cache.dtype.itemsize
    warps = 4 if rows <= 64 else 8
    if op.k_cache.dtype == torch.float8_e4m3fn and rows == 16 and op.head_dim <= 128:
        return Shape(rows, 128, warps, 3, pairs=True)
    if op.kv_dtype == PACKED_KV:  # as many keys as leave registers for their halves, with each Triton that is allowed
        return Shape(rows, 64 if op.head_dim <= 64 else 32 if op.head_dim <= 128 else 16, warps, 3)
    return Shape(rows, 32 if op.head_dim > 128 else 64, warps, {1: 4, 2: 3}.get(size, 2), pairs=size == 1)


def resident(op: Attention, shape: Shape, shared_bytes: int) -> int:
    """How many programs of decodes a multiprocessor has at a time, if each may have ``shared_bytes``.

    Shared memory counts the copies in flight plus 8 KiB. Two programs are enough to keep copies in flight: where there
    was room for more, they were slower on an H200, for a sequence then has more parts. Codes in a shape of eight warps
    take the registers of two.
    """
    by_registers = 1 if shape.warps > 4 and op.k_cache.dtype.itemsize == 1 else 2
    width: int = triton.next_power_of_2(op.head_dim)
    copies = (shape.stages - 1) * shape.keys * width * 2 * op.k_cache.dtype.itemsize
    return max(1, min(by_registers, (shared_bytes + RESERVED) // (copies + (8 << 10) + RESERVED)))


@triton.jit
def fold(top, total, acc, next_top, next_total, next_acc):
    """Two partial softmaxes as one: the maximum, the sum and the weighted values of both."""
    largest = tl.maximum(top, next_top)
    safe = tl.where(largest == float("-inf"), 0.0, largest)  # neither saw a key
    old = tl.exp2(top - safe)
    new = tl.exp2(next_top - safe)
    acc = tl.fma(acc, old[:, None] + tl.zeros_like(acc), next_acc * new[:, None])
    return largest, tl.fma(total, old, next_total * new), acc


@triton.jit
def fold_sinks(top, total, acc, sinks_ptr, heads, mine):
    """A softmax with the scores of its rows' ``heads`` that belong to no key."""
    sinks = tl.load(sinks_ptr + heads, mask=mine, other=0.0) * 1.4426950408889634
    return fold(top, total, acc, sinks, tl.full(total.shape, 1.0, tl.float32), tl.zeros_like(acc))


def _signed(out: str, bits: str) -> str:
    """Two integers as float16: the sign bit turned, under the bits of 1280. The least gets the bits of 1.0 on top,
    which makes it NaN."""
    return f"set.eq.f16x2.f16x2 t, {bits}, least; or.b32 {bits}, {bits}, t; add.f16x2 {out}, {bits}, zero; "


_REGISTERS = ".reg .b32 l, h, t, least, zero; mov.b32 least, 0x65006500; mov.b32 zero, 0xE580E580; "
"""1280, and -1408."""
_INT8_PAIR: tl.constexpr = tl.constexpr(
    f"{{ {_REGISTERS} lop3.b32 l, $2, 0x00FF00FF, 0x65806580, 0x6A; shr.b32 h, $2, 8; "
    f"lop3.b32 h, h, 0x00FF00FF, 0x65806580, 0x6A; {_signed('$0', 'l')} {_signed('$1', 'h')} }}"
)
_INT8_ROW: tl.constexpr = tl.constexpr(
    f"{{ {_REGISTERS} xor.b32 t, $2, 0x80808080; prmt.b32 l, t, 0x65656565, 0x4140; "
    f"prmt.b32 h, t, 0x65656565, 0x4342; {_signed('$0', 'l')} {_signed('$1', 'h')} }}"
)
_E4M3_PAIR: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)


@triton.jit
def _with_nan(values, INTEGERS: tl.constexpr):
    return tl.where(values == -128.0, float("nan"), values) if INTEGERS else values


@triton.jit
def _pair(words, COMPUTE: tl.constexpr, INTEGERS: tl.constexpr, PTX: tl.constexpr):
    """The codes in the lower and in the upper halves of 16-bit words, as numbers.

    Two words fill a register: their lower bytes become one pair of float16, the upper bytes another. The interpreter
    cannot run assembly.
    """
    if PTX and tl.float16 == COMPUTE:
        ASM: tl.constexpr = _INT8_PAIR if INTEGERS else _E4M3_PAIR
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    low, high = words & 0xFF, (words >> 8) & 0xFF
    CODE: tl.constexpr = tl.int8 if INTEGERS else tl.float8e4nv
    low = low.to(tl.uint8).to(CODE, bitcast=True).to(COMPUTE)
    high = high.to(tl.uint8).to(CODE, bitcast=True).to(COMPUTE)
    return _with_nan(low, INTEGERS), _with_nan(high, INTEGERS)


@triton.jit
def _decoded(codes, COMPUTE: tl.constexpr, INTEGERS: tl.constexpr, PTX: tl.constexpr):
    """Codes, or numbers, as numbers. Four integers fill a register."""
    if PTX and INTEGERS and tl.float16 == COMPUTE:
        return tl.inline_asm_elementwise(_INT8_ROW, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return _with_nan(codes.to(COMPUTE), INTEGERS)


@triton.jit
def padded_halves(BLOCK_DIM: tl.constexpr, DIM: tl.constexpr):
    """Which element of a head each of BLOCK_DIM is, where both of its halves are padded, and whether it is one."""
    dims = tl.arange(0, BLOCK_DIM)
    half = dims % (BLOCK_DIM // 2)
    return dims // (BLOCK_DIM // 2) * (DIM // 2) + half, half < DIM // 2


@triton.jit
def in_halves(x):
    """The first and the second half of the columns of x."""
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))


@triton.jit
def whole_heads(acc, other, PAIRS: tl.constexpr, PACKED: tl.constexpr):
    """Sums of heads from those of their even and odd dimensions, or of their halves."""
    ROWS: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = 2 * acc.shape[1]
    if PAIRS:
        return tl.reshape(tl.join(acc, other), (ROWS, WIDTH))
    elif PACKED:
        return tl.reshape(tl.permute(tl.join(acc, other), (0, 2, 1)), (ROWS, WIDTH))
    else:
        return acc


@triton.jit
def _halves_of(codes, step, low):
    """Codes of 4 bits as float16 or float32: those in the lower and those in the upper halves of bytes."""
    return (codes & 15).to(step.dtype) * step + low, (codes >> 4).to(step.dtype) * step + low


@triton.jit
def attend(
    top, total, acc, odd, q, at, k_ptr, v_ptr, table_ptr, head, begin, end, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, INTEGERS: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr,
    PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax ``top``, ``total`` and ``acc`` of queries q [rows, BLOCK_DIM] at positions ``at``, with the keys from
    ``begin`` to ``end`` added. Not MASKED: every query sees all of them, and they are a multiple of KEYS.

    PAIRS: values are words of two codes; ``acc`` is of even dimensions, ``odd`` of the others. PACKED: ``acc`` is of
    the first half of a head, ``odd`` of the second.
    """
    dims = tl.arange(0, BLOCK_DIM)
    halves = tl.arange(0, BLOCK_DIM // 2)
    # ``begin`` is a multiple of KEYS, and KEYS of PAGE: where a key lies in its page is known beforehand.
    ahead = tl.arange(0, KEYS)
    cell = (head * PAGE + ahead % PAGE)[:, None] * DIM + dims[None, :]
    pair_cell = (head * PAGE + ahead % PAGE)[:, None] * (DIM // 2) + halves[None, :]
    if PACKED:
        HALF: tl.constexpr = DIM // 2
        q_first, q_second = in_halves(q)
        k_scales_ptr = k_ptr.to(tl.pointer_type(tl.float16), bitcast=True)
        v_scales_ptr = v_ptr.to(tl.pointer_type(tl.float16), bitcast=True)
        k_cell = halves[:, None] * PAGE + (ahead % PAGE)[None, :]
        v_cell = (ahead % PAGE)[:, None] * HALF + halves[None, :]
    table_ptr += ahead // PAGE
    pages = tl.load(table_ptr + begin // PAGE, mask=begin + ahead < end, other=0)
    for start in range(begin, end, KEYS):
        keys = start + ahead
        inside = keys < end
        cells = pages[:, None].to(tl.int64) * (KV_HEADS * PAGE * DIM) + cell
        pairs = pages[:, None].to(tl.int64) * (KV_HEADS * PAGE * DIM // 2) + pair_cell
        if PACKED:
            pages_now = pages
        # The pages of the next turn: copies of keys that wait for their pages would not run as far ahead.
        pages = tl.load(table_ptr + (start + KEYS) // PAGE, mask=keys + KEYS < end, other=0)
        # Memory behind the last key may be NaN. For keys the scores mask it, for values the mask is here.
        if PACKED:
            base = (pages_now.to(tl.int64) * KV_HEADS + head) * (PAGE * (HALF + 4))
            scales = base // 2 + PAGE * HALF // 2 + ahead % PAGE
            if BLOCK_DIM != DIM:
                k = tl.load(k_ptr + base[None, :] + k_cell, mask=(halves < HALF)[:, None], other=0)
                v = tl.load(v_ptr + base[:, None] + v_cell, mask=(halves < HALF)[None, :], other=0)
            else:
                k = tl.load(k_ptr + base[None, :] + k_cell)
                v = tl.load(v_ptr + base[:, None] + v_cell)
            k_step = tl.load(k_scales_ptr + scales).to(q.dtype)
            k_low = tl.load(k_scales_ptr + scales + PAGE).to(q.dtype)
            v_step = tl.load(v_scales_ptr + scales, mask=inside, other=0.0).to(q.dtype)
            v_low = tl.load(v_scales_ptr + scales + PAGE, mask=inside, other=0.0).to(q.dtype)
        elif PAIRS:
            v = tl.load(v_ptr + pairs, mask=inside[:, None] & (halves < DIM // 2)[None, :], other=0)
        elif BLOCK_DIM != DIM:
            v = tl.load(v_ptr + cells, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
        elif MASKED:
            v = tl.load(v_ptr + cells, mask=inside[:, None], other=0.0)
        else:
            v = tl.load(v_ptr + cells)
        if PACKED:
            first, second = _halves_of(k, k_step[None, :], k_low[None, :])
            scores = tl.dot(q_first, first, input_precision="ieee")
            scores = tl.dot(q_second, second, scores, input_precision="ieee")
        else:
            if BLOCK_DIM == DIM:
                k = tl.load(k_ptr + cells)
            else:
                k = tl.load(k_ptr + cells, mask=(dims < DIM)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(_decoded(k, q.dtype, INTEGERS, PTX)), input_precision="ieee")
        factor = scale
        if SOFTCAP > 0:  # the scale has divided by the cap, the cap has the factor of exp2
            scores = tanh(scores * scale)
            factor = SOFTCAP
        if MASKED:
            seen = keys[None, :] <= at[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(top, tl.max(scores, 1) * factor)
        safe = largest
        if MASKED:
            safe = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores * factor - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if PACKED:
            first, second = _halves_of(v, v_step[:, None], v_low[:, None])
            acc = tl.dot(weights.to(q.dtype), first, acc, input_precision="ieee")
            odd = tl.dot(weights.to(q.dtype), second, odd * shrink[:, None], input_precision="ieee")
        elif PAIRS:
            v_even, v_odd = _pair(v, q.dtype, INTEGERS, PTX)
            acc = tl.dot(weights.to(q.dtype), v_even, acc, input_precision="ieee")
            odd = tl.dot(weights.to(q.dtype), v_odd, odd * shrink[:, None], input_precision="ieee")
        else:
            v = _decoded(v, q.dtype, INTEGERS, False)  # the assembly would need registers that sm_80 lacks
            acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
        top = largest
    return top, total, acc, odd


@triton.jit
def _chunk(
    q, at, k_ptr, v_ptr, table_ptr, head, begin, end, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, INTEGERS: tl.constexpr, PACKED: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The partial softmax of queries q [ROWS, BLOCK_DIM] at positions ``at`` over keys from ``begin`` to ``end``."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM // 2 if PAIRS or PACKED else BLOCK_DIM], tl.float32)
    top, total, acc, odd = attend(
        top, total, acc, acc, q, at, k_ptr, v_ptr, table_ptr, head, begin, end, scale,
        KV_HEADS, DIM, BLOCK_DIM, KEYS, WINDOW, SOFTCAP, PAGE, INTEGERS, PACKED, PAIRS, PTX, True,
    )  # fmt: skip
    return top, total, whole_heads(acc, odd, PAIRS, PACKED)


@triton.jit
def _first_key(position, WINDOW: tl.constexpr):
    """The first key that a query sees."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    return position * 0


@triton.jit
def tile_kernel(
    qkv_ptr, out_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, tiles_ptr, positions_ptr, staged_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    COMPUTE: tl.constexpr, INTEGERS: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
    FOLDS: tl.constexpr,
):  # fmt: skip
    """A tile: (first row, queries, where its block table begins among the staged numbers)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # All heads of a tile begin together: tiles with the most keys come first.
    head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles_ptr + tile * 3)
    queries = tl.load(tiles_ptr + tile * 3 + 1)
    table_ptr = staged_ptr + tl.load(tiles_ptr + tile * 3 + 2)
    position = tl.load(positions_ptr + row)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    are_dims = dims < DIM
    if PACKED and BLOCK_DIM != DIM:
        dims, are_dims = padded_halves(BLOCK_DIM, DIM)
    real = (rows < queries * GROUP)[:, None] & are_dims[None, :]
    tokens = (row + rows // GROUP).to(tl.int64)[:, None]
    columns = (head * GROUP + rows % GROUP)[:, None] * DIM + dims[None, :]
    q = tl.load(qkv_ptr + tokens * ((HEADS + 2 * KV_HEADS) * DIM) + columns, mask=real, other=0.0).to(COMPUTE)
    at = position + tl.minimum(rows // GROUP, queries - 1)
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + head)
    end = position + queries
    begin = _first_key(position, WINDOW) // KEYS * KEYS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM // 2 if PACKED and not FOLDS else BLOCK_DIM], tl.float32)
    if FOLDS:
        for chunk in range(begin // CHUNK, tl.cdiv(end, CHUNK)):
            next_top, next_total, next_acc = _chunk(
                q, at, k_ptr, v_ptr, table_ptr, head,
                tl.maximum(begin, chunk * CHUNK), tl.minimum(end, (chunk + 1) * CHUNK), scale,
                KV_HEADS, DIM, BLOCK_DIM, ROWS, KEYS, WINDOW, SOFTCAP, PAGE, INTEGERS, PACKED, PAIRS, PTX,
            )  # fmt: skip
            top, total, acc = fold(top, total, acc, next_top, next_total, next_acc)
    else:
        odd = acc
        if WINDOW == 0:  # what the first query sees, all do
            middle = (position + 1) // KEYS * KEYS
            top, total, acc, odd = attend(
                top, total, acc, odd, q, at, k_ptr, v_ptr, table_ptr, head, begin, middle, scale,
                KV_HEADS, DIM, BLOCK_DIM, KEYS, WINDOW, SOFTCAP, PAGE, INTEGERS, PACKED, PAIRS, PTX, False,
            )  # fmt: skip
            begin = middle
        top, total, acc, odd = attend(
            top, total, acc, odd, q, at, k_ptr, v_ptr, table_ptr, head, begin, end, scale,
            KV_HEADS, DIM, BLOCK_DIM, KEYS, WINDOW, SOFTCAP, PAGE, INTEGERS, PACKED, PAIRS, PTX, True,
        )  # fmt: skip
        acc = whole_heads(acc, odd, PAIRS, PACKED)
    if sinks_ptr is not None:
        mine = rows < queries * GROUP
        top, total, acc = fold_sinks(top, total, acc, sinks_ptr, head * GROUP + rows % GROUP, mine)
    weight = 1.0
    if v_scale_ptr is not None:
        weight = tl.load(v_scale_ptr + head)
    out = acc * (weight / total)[:, None]
    tl.store(out_ptr + tokens * (HEADS * DIM) + columns, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def decode_kernel(
    qkv_ptr, out_ptr, partial_ptr, softmax_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    units_ptr, count_ptr, positions_ptr, staged_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    COMPUTE: tl.constexpr, INTEGERS: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A unit: (row, chunk, where its block table begins among the staged numbers); each for every key head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    are_dims = dims < DIM
    if PACKED and BLOCK_DIM != DIM:
        dims, are_dims = padded_halves(BLOCK_DIM, DIM)
    real = (rows < GROUP)[:, None] & are_dims[None, :]
    for task in range(tl.program_id(0), tl.load(count_ptr) * KV_HEADS, tl.num_programs(0)):
        unit, head = task // KV_HEADS, task % KV_HEADS
        row = tl.load(units_ptr + unit * 3).to(tl.int64)
        chunk = tl.load(units_ptr + unit * 3 + 1)
        table_ptr = staged_ptr + tl.load(units_ptr + unit * 3 + 2)
        position = tl.load(positions_ptr + row)
        first = _first_key(position, WINDOW)
        if (chunk + 1) * CHUNK > first:
            columns = (head * GROUP + rows)[:, None] * DIM + dims[None, :]
            q_at = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * DIM) + columns
            q = tl.load(q_at, mask=real, other=0.0).to(COMPUTE)
            k_scale = scale
            if k_scale_ptr is not None:
                k_scale = scale * tl.load(k_scale_ptr + head)
            top, total, acc = _chunk(
                q, position + rows * 0, k_ptr, v_ptr, table_ptr, head,
                tl.maximum(first // KEYS * KEYS, chunk * CHUNK), tl.minimum(position + 1, (chunk + 1) * CHUNK), k_scale,
                KV_HEADS, DIM, BLOCK_DIM, ROWS, KEYS, WINDOW, SOFTCAP, PAGE, INTEGERS, PACKED, PAIRS, PTX,
            )  # fmt: skip
            if first // CHUNK == position // CHUNK:  # all of its keys
                if sinks_ptr is not None:
                    top, total, acc = fold_sinks(top, total, acc, sinks_ptr, head * GROUP + rows, rows < GROUP)
                weight = 1.0
                if v_scale_ptr is not None:
                    weight = tl.load(v_scale_ptr + head)
                out = acc * (weight / total)[:, None]
                tl.store(out_ptr + row * (HEADS * DIM) + columns, out.to(out_ptr.dtype.element_ty), mask=real)
            else:
                heads = (unit * HEADS + head * GROUP) + rows.to(tl.int64)
                tl.store(partial_ptr + heads[:, None] * DIM + dims[None, :], acc, mask=real)
                tl.store(softmax_ptr + heads * 2, top, mask=rows < GROUP)
                tl.store(softmax_ptr + heads * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def merge_kernel(
    out_ptr, partial_ptr, softmax_ptr, v_scale_ptr, sinks_ptr, decodes_ptr, positions_ptr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A decode: (row or -1, its first unit). Its chunks are folded in their order."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(1)
    row = tl.load(decodes_ptr + tl.program_id(0) * 2).to(tl.int64)
    unit = tl.load(decodes_ptr + tl.program_id(0) * 2 + 1).to(tl.int64)
    if row >= 0:
        position = tl.load(positions_ptr + row)
        first = _first_key(position, WINDOW) // CHUNK
        last = position // CHUNK
        if first < last:
            rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
            mine = rows < GROUP
            real = mine[:, None] & (dims < DIM)[None, :]
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
            for chunk in tl.range(first, last + 1, num_stages=STAGES):  # each waits for memory, not for the last
                heads = (unit + chunk) * HEADS + head * GROUP + rows
                next_top = tl.load(softmax_ptr + heads * 2, mask=mine, other=0.0)
                next_total = tl.load(softmax_ptr + heads * 2 + 1, mask=mine, other=1.0)
                next_acc = tl.load(partial_ptr + heads[:, None] * DIM + dims[None, :], mask=real, other=0.0)
                top, total, acc = fold(top, total, acc, next_top, next_total, next_acc)
            if sinks_ptr is not None:
                top, total, acc = fold_sinks(top, total, acc, sinks_ptr, head * GROUP + rows, mine)
            weight = 1.0
            if v_scale_ptr is not None:
                weight = tl.load(v_scale_ptr + head)
            out = acc * (weight / total)[:, None]
            columns = (head * GROUP + rows)[:, None] * DIM + dims[None, :]
            tl.store(out_ptr + row * (HEADS * DIM) + columns, out.to(out_ptr.dtype.element_ty), mask=real)


def compute_dtype(op: Attention) -> torch.dtype:
    """The dtype of the products: the cache's own, or float16 for codes."""
    if op.k_cache.dtype.itemsize == 1:
        return torch.float32 if op.qkv.dtype == torch.float32 else torch.float16
    return op.k_cache.dtype


def constants(op: Attention, shape: Shape) -> dict[str, Any]:
    """The constants that the kernels are specialized for."""
    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return {
        "HEADS": op.heads, "KV_HEADS": op.kv_heads, "DIM": op.head_dim,
        "BLOCK_DIM": triton.next_power_of_2(op.head_dim), "ROWS": shape.rows, "KEYS": shape.keys, "CHUNK": CHUNK,
        "WINDOW": op.window, "SOFTCAP": op.softcap * LOG2E, "PAGE": BLOCK_SIZE, "COMPUTE": names[compute_dtype(op)],
        "INTEGERS": op.k_cache.dtype == torch.int8, "PACKED": op.kv_dtype == PACKED_KV, "PAIRS": shape.pairs,
        "PTX": takes_ptx(op.qkv.device),
    }  # fmt: skip


def merge_constants(op: Attention, known: dict[str, Any]) -> dict[str, Any]:
    """Those of ``merge_kernel``, from ``constants``. As many chunks are in flight as 64 KiB hold, up to three."""
    folded = {name: known[name] for name in ("HEADS", "KV_HEADS", "DIM", "BLOCK_DIM", "CHUNK", "WINDOW")}
    rows = triton.next_power_of_2(op.heads // op.kv_heads)
    return folded | {"ROWS": rows, "STAGES": 1 + min(3, (64 << 10) // (rows * folded["BLOCK_DIM"] * 4))}


def softmax_scale(op: Attention) -> float:
    """What the products are multiplied by before ``exp2``, or before a cap."""
    return op.scale / op.softcap if op.softcap > 0 else op.scale * LOG2E


def attend_tiles(op: Attention, shape: Shape, tiles: Tensor, positions: Tensor, staged: Tensor) -> None:
    """The queries of ``tiles`` int32 [n, 3], see ``tile_kernel``; each at most ``shape.rows`` rows of a key head."""
    at(tile_kernel, (op.kv_heads, len(tiles)))(
        op.qkv, op.out, op.k_cache, op.v_cache, op.k_scale, op.v_scale, op.sinks, tiles, positions, staged,
        softmax_scale(op), **constants(op, shape), FOLDS=shape.folds, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def attend_decodes(
    op: Attention, shape: Shape, partial: Tensor, softmax: Tensor, units: Tensor, count: Tensor, decodes: Tensor,
    positions: Tensor, staged: Tensor, programs: int,
) -> None:  # fmt: skip
    """The queries of ``decodes`` int32 [n, 2] by the first ``count`` (int32 [1]) of their ``units`` int32 [*, 3].

    ``partial`` float32 [units, heads, head_dim] and ``softmax`` float32 [units, heads, 2] hold what the first kernel
    leaves for the second. ``programs`` share out the units.
    """
    known = constants(op, shape)
    values = op.v_cache.view(torch.int16) if shape.pairs else op.v_cache
    at(decode_kernel, (programs,))(
        op.qkv, op.out, partial, softmax, op.k_cache, values, op.k_scale, op.v_scale, op.sinks, units, count, positions,
        staged, softmax_scale(op), **known, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    folded = merge_constants(op, known)
    at(merge_kernel, (len(decodes), op.kv_heads))(
        op.out, partial, softmax, op.v_scale, op.sinks, decodes, positions,
        **folded, num_warps=4, num_stages=folded["STAGES"],
    )
