"""Causal attention over a paged cache of latents (DeepSeek-V2, arXiv 2405.04434), whose keys hold the values.

All heads of a token share its one key, so heads are the rows of the products: a key is read once for a tile of them,
and what was read for the scores is multiplied by the weights as well. Keys are divided and folded as in ``attention``:
prompts by tiles of queries and heads, decodes by units of ``chunk`` keys whose partial results are folded in order.

The sum of a row has up to 512 numbers, more than those of ``attention`` have. So a tile of a prompt keeps one, from
its first key to its last, and there its last bits are not those of a decode. Where they must be, tiles have 16 rows
and fold chunks as decodes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import BLOCK_SIZE, LatentAttention
from qserve.kernels.triton.attention import CHUNK, LOG2E, RESERVED, fold
from qserve.kernels.triton.launch import at

WIDEST = (512, 64)
"""The most numbers of a latent and of its rotated key."""
_ROOMY = 160 << 10
"""Bytes of shared memory from which on a tile has 32 rows. The registers of none suffice for 64."""
_LEAST = 16  # rows, and numbers of a product, of a matrix unit


@dataclass(frozen=True)
class LatentShape:
    """How a product is cut: ``rows`` of queries and heads, ``keys`` at a time, ``stages`` of keys in flight.
    ``folded``: a tile folds chunks."""

    rows: int
    keys: int
    warps: int
    stages: int
    folded: bool = False

    def heads(self, op: LatentAttention) -> int:
        """Heads of one query in a tile."""
        return min(op.heads, self.rows)

    def queries(self, op: LatentAttention) -> int:
        return self.rows // self.heads(op)

    def parts(self, op: LatentAttention) -> int:
        """Tiles that the heads of a query take."""
        return -(-op.heads // self.rows)


def chunk(op: LatentAttention) -> int:
    """Keys of one unit of work: a partial result is less than half of the bytes of its keys."""
    return CHUNK if op.heads <= 32 else 2 * CHUNK


def tile_shape(op: LatentAttention, shared_bytes: int, warp: int, *, folded: bool = False) -> LatentShape:
    """For prompts, on a GPU with ``shared_bytes`` for a program and warps of ``warp``. ``folded``: for decodes too."""
    return _shape(op, 32 if shared_bytes >= _ROOMY and not folded else _LEAST, warp, folded)


def decode_shape(op: LatentAttention, shared_bytes: int, warp: int) -> LatentShape:
    """For decodes: heads of one query."""
    most = tile_shape(op, shared_bytes, warp).rows
    return _shape(op, max(_LEAST, min(triton.next_power_of_2(op.heads), most)), warp)


def _shape(op: LatentAttention, rows: int, warp: int, folded: bool = False) -> LatentShape:
    """A thread keeps 64 numbers of a sum, and has registers for no more; those of two sums where a tile folds."""
    threads = max(128, rows * _blocks(op)[0] // 64) * (1 + folded)
    return LatentShape(rows, 32, threads // warp, 3, folded)


def needed(op: LatentAttention, shape: LatentShape) -> int:
    """Bytes of shared memory of a program: its queries, keys that are ahead, and weights on their way."""
    ahead = (shape.stages - 1) * shape.keys
    return ((ahead + shape.rows) * sum(_blocks(op)) + shape.rows * shape.keys) * op.cache.dtype.itemsize


def resident(op: LatentAttention, shape: LatentShape, shared_bytes: int) -> int:
    """How many programs of decodes a multiprocessor holds at a time, by shared memory and by registers."""
    return max(1, min(8 // shape.warps, (shared_bytes + RESERVED) // (needed(op, shape) + RESERVED)))


def _blocks(op: LatentAttention) -> tuple[int, int]:
    """The numbers of a latent and of its rotated key, padded."""
    latent, rope = (max(_LEAST, triton.next_power_of_2(n)) for n in (op.rank, op.width - op.rank))
    return latent, rope


@triton.jit
def _partial(
    q, q_rope, at, cache_ptr, table_ptr, begin, end, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The partial softmax of queries q [ROWS, BLOCK_RANK] and q_rope [ROWS, BLOCK_ROPE] at positions ``at`` over keys
    from ``begin``, a multiple of KEYS, to ``end``."""
    dims, turned, ahead = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE), tl.arange(0, KEYS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_RANK], tl.float32)
    table_ptr += ahead // PAGE
    pages = tl.load(table_ptr + begin // PAGE, mask=begin + ahead < end, other=0)
    for start in range(begin, end, KEYS):
        keys = start + ahead
        inside = keys < end
        cells = cache_ptr + (pages.to(tl.int64) * PAGE + ahead % PAGE)[:, None] * (RANK + ROPE)
        # The pages of the next turn: copies of keys that wait for their pages would not run as far ahead.
        pages = tl.load(table_ptr + (start + KEYS) // PAGE, mask=keys + KEYS < end, other=0)
        # Memory behind the last key may be NaN.
        if BLOCK_RANK == RANK:
            latent = tl.load(cells + dims[None, :], mask=inside[:, None], other=0.0)
        else:
            latent = tl.load(cells + dims[None, :], mask=inside[:, None] & (dims < RANK)[None, :], other=0.0)
        rope = tl.load(cells + RANK + turned[None, :], mask=inside[:, None] & (turned < ROPE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale
        scores = tl.where(keys[None, :] <= at[:, None], scores, float("-inf"))
        largest = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        top = largest
    return top, total, acc


@triton.jit
def _queries(
    q_ptr, tokens, heads, mine,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Of each row its query for latents and that for rotated keys; zeros where it is not ``mine``."""
    dims, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    q_ptr += ((tokens * HEADS + heads) * (RANK + ROPE))[:, None]
    q = tl.load(q_ptr + dims[None, :], mask=mine[:, None] & (dims < RANK)[None, :], other=0.0)
    q_rope = tl.load(q_ptr + RANK + turned[None, :], mask=mine[:, None] & (turned < ROPE)[None, :], other=0.0)
    return q.to(COMPUTE), q_rope.to(COMPUTE)


@triton.jit
def _store(
    out_ptr, tokens, heads, mine, total, acc, HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr
):
    dims = tl.arange(0, BLOCK_RANK)
    places = ((tokens * HEADS + heads) * RANK)[:, None] + dims[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask=mine[:, None] & (dims < RANK)[None, :])


@triton.jit
def latent_tile_kernel(
    q_ptr, out_ptr, cache_ptr, tiles_ptr, positions_ptr, staged_ptr, scale,
    HEADS: tl.constexpr, EACH: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, FOLDED: tl.constexpr,
    PAGE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """A tile: (first row, queries, where its block table begins among the staged numbers); EACH heads of each."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles_ptr + tile * 3)
    queries = tl.load(tiles_ptr + tile * 3 + 1)
    table_ptr = staged_ptr + tl.load(tiles_ptr + tile * 3 + 2)
    position = tl.load(positions_ptr + row)
    rows = tl.arange(0, ROWS)
    heads = part * EACH + rows % EACH
    mine = (rows < queries * EACH) & (heads < HEADS)
    tokens = (row + rows // EACH).to(tl.int64)
    q, q_rope = _queries(q_ptr, tokens, heads, mine, HEADS, RANK, ROPE, BLOCK_RANK, BLOCK_ROPE, COMPUTE)
    at = position + tl.minimum(rows // EACH, queries - 1)
    end = position + queries
    if FOLDED:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_RANK], tl.float32)
        for chunk in range(tl.cdiv(end, CHUNK)):
            next_top, next_total, next_acc = _partial(
                q, q_rope, at, cache_ptr, table_ptr, chunk * CHUNK, tl.minimum(end, (chunk + 1) * CHUNK), scale,
                RANK, ROPE, BLOCK_RANK, BLOCK_ROPE, ROWS, KEYS, PAGE,
            )  # fmt: skip
            top, total, acc = fold(top, total, acc, next_top, next_total, next_acc)
    else:
        top, total, acc = _partial(
            q, q_rope, at, cache_ptr, table_ptr, 0, end, scale, RANK, ROPE, BLOCK_RANK, BLOCK_ROPE, ROWS, KEYS, PAGE
        )
    _store(out_ptr, tokens, heads, mine, total, acc, HEADS, RANK, BLOCK_RANK)


@triton.jit
def latent_decode_kernel(
    q_ptr, out_ptr, partial_ptr, softmax_ptr, cache_ptr, units_ptr, count_ptr, positions_ptr, staged_ptr, scale,
    HEADS: tl.constexpr, EACH: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """A unit: (row, chunk, where its block table begins among the staged numbers); each for every EACH heads."""
    PARTS: tl.constexpr = (HEADS + EACH - 1) // EACH
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_RANK)
    for task in range(tl.program_id(0), tl.load(count_ptr) * PARTS, tl.num_programs(0)):
        unit = task // PARTS
        row = tl.load(units_ptr + unit * 3).to(tl.int64)
        chunk = tl.load(units_ptr + unit * 3 + 1)
        table_ptr = staged_ptr + tl.load(units_ptr + unit * 3 + 2)
        position = tl.load(positions_ptr + row)
        heads = task % PARTS * EACH + rows
        mine = (rows < EACH) & (heads < HEADS)
        q, q_rope = _queries(q_ptr, row, heads, mine, HEADS, RANK, ROPE, BLOCK_RANK, BLOCK_ROPE, COMPUTE)
        top, total, acc = _partial(
            q, q_rope, position + rows * 0, cache_ptr, table_ptr,
            chunk * CHUNK, tl.minimum(position + 1, (chunk + 1) * CHUNK), scale,
            RANK, ROPE, BLOCK_RANK, BLOCK_ROPE, ROWS, KEYS, PAGE,
        )  # fmt: skip
        if position < CHUNK:  # all of its keys
            _store(out_ptr, row, heads, mine, total, acc, HEADS, RANK, BLOCK_RANK)
        else:
            places = unit.to(tl.int64) * HEADS + heads
            real = mine[:, None] & (dims < RANK)[None, :]
            tl.store(partial_ptr + places[:, None] * RANK + dims[None, :], acc, mask=real)
            tl.store(softmax_ptr + places * 2, top, mask=mine)
            tl.store(softmax_ptr + places * 2 + 1, total, mask=mine)


@triton.jit
def latent_merge_kernel(
    out_ptr, partial_ptr, softmax_ptr, decodes_ptr, positions_ptr,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A decode: (row or -1, its first unit). The chunks of ROWS heads are folded in their order."""
    row = tl.load(decodes_ptr + tl.program_id(0) * 2).to(tl.int64)
    unit = tl.load(decodes_ptr + tl.program_id(0) * 2 + 1).to(tl.int64)
    if row >= 0:
        last = tl.load(positions_ptr + row) // CHUNK
        if last > 0:
            heads, dims = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_RANK)
            mine = heads < HEADS
            real = mine[:, None] & (dims < RANK)[None, :]
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_RANK], tl.float32)
            for chunk in tl.range(0, last + 1, num_stages=3):  # each waits for memory, not for the last
                places = (unit + chunk) * HEADS + heads
                next_top = tl.load(softmax_ptr + places * 2, mask=mine, other=0.0)
                next_total = tl.load(softmax_ptr + places * 2 + 1, mask=mine, other=1.0)
                next_acc = tl.load(partial_ptr + places[:, None] * RANK + dims[None, :], mask=real, other=0.0)
                top, total, acc = fold(top, total, acc, next_top, next_total, next_acc)
            _store(out_ptr, row, heads, mine, total, acc, HEADS, RANK, BLOCK_RANK)


_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def constants(op: LatentAttention, shape: LatentShape) -> dict[str, Any]:
    """The constants that the kernels of tiles and units are specialized for."""
    latent, rope = _blocks(op)
    return {
        "HEADS": op.heads, "EACH": shape.heads(op), "RANK": op.rank, "ROPE": op.width - op.rank, "BLOCK_RANK": latent,
        "BLOCK_ROPE": rope, "ROWS": shape.rows, "KEYS": shape.keys, "CHUNK": chunk(op), "PAGE": BLOCK_SIZE,
        "COMPUTE": _COMPUTE[op.cache.dtype],
    }  # fmt: skip


def merge_constants(op: LatentAttention) -> dict[str, Any]:
    rows = min(4, triton.next_power_of_2(op.heads))
    return {"HEADS": op.heads, "RANK": op.rank, "BLOCK_RANK": _blocks(op)[0], "ROWS": rows, "CHUNK": chunk(op)}


def attend_tiles(op: LatentAttention, shape: LatentShape, tiles: Tensor, positions: Tensor, staged: Tensor) -> None:
    """The queries of ``tiles`` int32 [n, 3], see ``latent_tile_kernel``; each at most ``shape.queries``."""
    at(latent_tile_kernel, (len(tiles), shape.parts(op)))(
        op.q, op.out, op.cache, tiles, positions, staged, op.scale * LOG2E, FOLDED=shape.folded,
        **constants(op, shape), num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def attend_decodes(
    op: LatentAttention, shape: LatentShape, partial: Tensor, softmax: Tensor, units: Tensor, count: Tensor,
    decodes: Tensor, positions: Tensor, staged: Tensor, programs: int,
) -> None:  # fmt: skip
    """The queries of ``decodes`` int32 [n, 2] by the first ``count`` (int32 [1]) of their ``units`` int32 [*, 3].

    ``partial`` float32 [units, heads, rank] and ``softmax`` float32 [units, heads, 2] hold what the first kernel leaves
    for the second. ``programs`` share out the units.
    """
    at(latent_decode_kernel, (programs,))(
        op.q, op.out, partial, softmax, op.cache, units, count, positions, staged, op.scale * LOG2E,
        **constants(op, shape), num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    folded = merge_constants(op)
    at(latent_merge_kernel, (len(decodes), triton.cdiv(op.heads, folded["ROWS"])))(
        op.out, partial, softmax, decodes, positions, **folded, num_warps=4
    )
