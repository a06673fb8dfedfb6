"""Trellis codes (``checkpoint.trellis``) times inputs in floating point, decoded from their streams.

Eight outputs that follow each other, an octet, are decoded together: for an input their windows lie in two or three
words of 16 bits. Output j of every octet is a product of its own, so words reach the registers of the matrix unit as
float16 would, every thread decodes what it multiplies, and nothing is shuffled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.checkpoint.grid import TRELLIS
from qserve.checkpoint.trellis import FACTOR
from qserve.kernels.triton.finish import finish
from qserve.kernels.triton.grouped import grouped_rows
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.prepack import Planes
from qserve.kernels.triton.target import Target, takes_ptx
from qserve.kernels.triton.tuning.configs import Config
from qserve.kernels.triton.unpack import unit, unpack

_OUTPUTS = 256
"""That a program dequantizes."""
_FACTOR = tl.constexpr(FACTOR)
_ZERO = tl.constexpr(TRELLIS.zero)
# ``codes_of_states`` of two windows, in the low bytes of two halves: products, pairs of nibbles, and pairs of those.
_CODES = tl.constexpr("""{ .reg .b32 a, b; and.b32 a, $1, 0xFFF; and.b32 b, $2, 0xFFF;
mul.lo.u32 a, a, FACTOR; mul.lo.u32 b, b, FACTOR; prmt.b32 a, a, b, 0x5410;
shr.b32 b, a, 4; and.b32 a, a, 0x0F0F0F0F; and.b32 b, b, 0x0F0F0F0F; add.u32 a, a, b;
shr.b32 b, a, 8; add.u32 $0, a, b; }""".replace("FACTOR", str(_FACTOR.value)))


@triton.jit
def _streams(first, second, begin, BITS: tl.constexpr, SLICE: tl.constexpr):
    """The bits that hold the windows of outputs 0 to 3 of octets, and those of 4 to 7, as uint32. ``first``,
    ``second``: where words lie; a third follows."""
    low, middle = _word(first), _word(second)
    lower = low | (middle << 16)
    if BITS == 2:
        upper = lower
    else:
        high = _word(second + SLICE)
        upper = middle | (high << 16)
    if BITS == 3:
        # The octets of a tile differ. Only what is loaded beside words lets these be loaded as they are multiplied.
        bits = (lower.to(tl.uint64) | (high.to(tl.uint64) << 32)) >> (tl.load(begin) % 16).to(tl.uint64)
        lower, upper = bits.to(tl.uint32), (bits >> 12).to(tl.uint32)
    return lower, upper


@triton.jit
def _word(place):
    return tl.load(place).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _weights(streams, J: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Output J of octets as numbers, in units of ``unit``, exactly."""
    LOWER: tl.constexpr = 0 if BITS == 3 else BITS + 4  # where the first window begins in the lower bits
    SKIPPED: tl.constexpr = 0 if J < 4 or BITS == 2 else 12 if BITS == 3 else 16  # of them by the upper bits
    windows = streams[J // 4] >> (LOWER + J * BITS - SKIPPED)
    if PTX and tl.float32 != DTYPE:
        codes = tl.inline_asm_elementwise(_CODES, "=r,r,r", [windows], dtype=tl.int16, is_pure=True, pack=2)
    else:
        product = (windows & 0xFFF) * _FACTOR
        codes = (product & 15) + ((product >> 4) & 15) + ((product >> 8) & 15) + ((product >> 12) & 15)
    return unpack(codes.to(tl.int16), tl.full((1, 1), _ZERO, DTYPE), 0, 8, DTYPE, PTX)


@triton.jit
def _in_turn(even, odd):
    """The columns of both."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit(do_not_specialize=["rows", "blocks", "splits"])
def trellis_kernel(
    x, words, places, scales, bias, out, partial, arrived, tiles, order,
    rows, n, k, stride_x, stride_out, padded_n, block_rows, blocks, splits,
    BITS: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PTX: tl.constexpr, EACH: tl.constexpr, TOP_K: tl.constexpr, SORTED_X: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = x [rows, k] times weight [n, k] transposed.

    words   int16 [blocks, block_rows, SLICE], and ``places`` int32 [2, padded_n / 8]: ``prepack.Planes``
    scales  float32 [groups, padded_n], of GROUP inputs each (0: all)
    The other arguments are those of ``weight_only_kernel``.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PRECISION: tl.constexpr = "tf32x3" if PTX else "ieee"
    tile, split = tl.program_id(0), tl.program_id(1)
    if EACH > 0:
        tiles_m = tl.num_programs(0) // tl.cdiv(n, BLOCK_N)
        expert = tl.load(tiles + (tile % tiles_m) * 3)
        if expert < 0:
            return
        x_rows, ms = grouped_rows(tiles, order, tile % tiles_m, rows, BLOCK_M, TOP_K, SORTED_X)
        w_begin = expert * EACH
    else:
        tiles_m = tl.cdiv(rows, BLOCK_M)
        ms = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        x_rows = ms
        w_begin = 0
    ns = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = places + (w_begin + (tile // tiles_m) * BLOCK_N) // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
    ks = tl.arange(0, SLICE)
    first = words + tl.load(begin) // 16 * SLICE + ks[:, None]
    second = words + tl.load(begin + padded_n // 8) * SLICE + ks[:, None]
    seen = ms < rows
    x_at = x_rows[:, None] * stride_x + ks[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(split * blocks // splits, (split + 1) * blocks // splits, num_stages=STAGES):
        mask = seen[:, None]
        if not EVEN_K:
            mask = mask & (block * SLICE + ks < k)[None, :]
        slice_x = tl.load(x + block * SLICE + x_at, mask=mask, other=0.0)
        skipped = block * (block_rows * SLICE)
        streams = _streams(first + skipped, second + skipped, begin, BITS, SLICE)
        sums = ()
        for j in tl.static_range(8):
            slice_w = _weights(streams, j, BITS, DTYPE, PTX)
            sums += (tl.dot(slice_x, slice_w, input_precision=PRECISION),)  # type: ignore[assignment]
        even = _in_turn(_in_turn(sums[0], sums[4]), _in_turn(sums[2], sums[6]))  # type: ignore[misc]
        odd = _in_turn(_in_turn(sums[1], sums[5]), _in_turn(sums[3], sums[7]))  # type: ignore[misc]
        acc = _in_turn(even, odd)
        if GROUP != 0:
            acc *= tl.load(scales + block * SLICE // GROUP * padded_n + w_begin + ns)[None, :]
        total += acc
    total *= unit(DTYPE)
    if GROUP == 0:
        total *= tl.load(scales + w_begin + ns)[None, :]
    finish(total, out, bias, partial, arrived, tile, split, ms, ns, rows, n, stride_out, padded_n,
           splits, HAS_BIAS, ACCUMULATE, SPLIT)  # fmt: skip


@triton.jit
def dequantize_trellis_kernel(
    words, places, scales, out, padded_n, block_rows, first, last, stride_out,
    BITS: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """``dequantize_kernel`` for the arguments of ``trellis_kernel``. ``first`` is a multiple of BLOCK_N."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(0)
    octets = (first // BLOCK_N + tl.program_id(1)) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    ks = tl.arange(0, SLICE)[None, :]
    begin = places + octets[:, None]
    at_block = words + block.to(tl.int64) * block_rows * SLICE
    first_word = at_block + tl.load(begin) // 16 * SLICE + ks
    streams = _streams(first_word, at_block + tl.load(begin + padded_n // 8) * SLICE + ks, begin, BITS, SLICE)
    group = 0 if GROUP == 0 else block * SLICE // GROUP
    for j in tl.static_range(8):
        ns = octets * 8 + j
        scale = tl.load(scales + group * padded_n + ns) * unit(DTYPE)
        value = _weights(streams, j, BITS, DTYPE, PTX).to(tl.float32) * scale[:, None]
        place = (ns - first)[:, None].to(tl.int64) * stride_out + block * SLICE + ks
        tl.store(out + place, value.to(DTYPE), mask=(ns < last)[:, None])


def default(rows: int, gpu: Target, invariant: bool = False) -> Config:
    """A safe default: no spills, and fits the shared memory of the smallest GPU. ``invariant``: the same instruction
    for every number of rows.

    Each of four warps has 8 columns of every product. In tiles of more rows warps would share columns, and each would
    decode their weights; only the matrix unit of sm_90 takes those from shared memory.
    """
    if rows > 32 and "wgmma" in gpu.features and not invariant:
        return Config(64, 256, warps=8, stages=3)
    return Config(16, 256, warps=4, stages=4)


def fewest_rows(gpu: Target) -> int:
    """To be dequantized first. Counted, not measured, as ``dequantize.FEWEST_ROWS`` is: on an H200, to write and read
    2 bytes of a weight takes 0.9 ps and to decode it 0.45 ps, which tiles do for each 64 rows; on an A100, 2 ps, and
    0.6 ps for each 16."""
    return 257 if "wgmma" in gpu.features else 65


def dequantize(planes: Planes, out: Tensor, first: int, last: int) -> None:
    """``out`` [last - first, padded k]: outputs ``first`` to ``last``. ``first`` is a multiple of 256."""
    assert planes.places is not None and first % _OUTPUTS == 0
    at(dequantize_trellis_kernel, (planes.blocks, -(-(last - first) // _OUTPUTS)))(
        planes.words, planes.places, planes.scales, out,
        planes.padded_n, planes.words.shape[1], first, last, out.stride(0),
        BITS=planes.bits, SLICE=planes.slice, GROUP=planes.group, BLOCK_N=_OUTPUTS, PTX=takes_ptx(out.device),
        num_warps=4,
    )  # fmt: skip
