"""The gated delta rule by chunks of ``CHUNK`` tokens, in products of matrices: ``ops.GatedDelta`` of prompts.

Let G be the sum of the logarithms of the decays from the chunk's first token on, S the state before it, and k, q, v and
beta those of its tokens, k and q as the rule takes them. What a token adds to the state is k u^T, and with

    L[i, j] = beta[i] exp(G[i] - G[j]) k[i] k[j]  for j < i

all u of a chunk are (I + L)^-1 beta (v - exp(G) S^T k): the UT transform (Yang et al., arXiv 2406.06484, 2412.06464).
Then each output is exp(G) S^T q + the sum over j <= i of exp(G[i] - G[j]) (q[i] k[j]) u[j].

``delta_solve_kernel`` makes the inverse times beta, ``delta_scores_kernel`` the factors of u in the outputs: a program
for each head of a chunk. ``delta_fold_kernel`` goes through the chunks of a run one after the other, with some columns
of a head's state.

k and q enter the products as they are stored, and are divided by their lengths behind them. A float32 number enters a
product of 16-bit numbers as two of them, so what is kept of it has 16 bits or more; only what an output alone depends
on is rounded to one. Rows behind a chunk's last token are zeros, which change no sum. So a state that is saved on the
way has the bits of one whose run ends there, and a run has the same bits as two that are cut at a multiple of ``CHUNK``
tokens behind its first; cut elsewhere, they differ in their last bits. A NaN spreads over all of its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import GatedDelta
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.runs import CHUNK
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.workspace import Workspace

WIDEST = 128
"""The most numbers of a key."""
COLUMNS = 32
"""Columns of a state in a program."""
WARPS, FOLD_THREADS = 4, 256
_ROOMY = 99 << 10
_PART = 16  # tokens of a chunk whose part of the inverse is found row by row
_LEAST = 16  # numbers of a product of a matrix unit


@triton.jit
def log_decay(a, bias, rate):
    """The logarithm of what is left of a state: rate * softplus(a + bias)."""
    x = a + bias
    small = tl.exp(x)
    one = 1.0 + small
    soft = tl.where(one == 1.0, small, tl.log(one) * (small / (one - 1.0)))  # log(1 + small), to its last bits
    return rate * tl.where(x > 20.0, x, soft)


@triton.jit
def _halves(x, COMPUTE: tl.constexpr):
    """Two numbers whose sum is x, or nearly."""
    high = x.to(COMPUTE)
    return high, (x - high.to(tl.float32)).to(COMPUTE)


@triton.jit
def _half_product(a, b, total, COMPUTE: tl.constexpr):
    """total + a b, for a in COMPUTE."""
    if tl.float32 == COMPUTE:
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        high, low = _halves(b, COMPUTE)
        return tl.dot(a, high, tl.dot(a, low, total))


@triton.jit
def _product(a, b, COMPUTE: tl.constexpr):
    """a b."""
    if tl.float32 == COMPUTE:
        return tl.dot(a, b, input_precision="ieee")
    else:
        high, low = _halves(a, COMPUTE)
        return _half_product(high, b, tl.dot(low, b.to(COMPUTE)), COMPUTE)


@triton.jit
def _inside(lines, keys, KEY_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr):
    """The mask of a tile: all numbers of a key for those ``lines`` that are true."""
    if KEY_DIM == BLOCK_KEY:
        return tl.broadcast_to(lines[:, None], (lines.shape[0], BLOCK_KEY))
    else:
        return lines[:, None] & (keys < KEY_DIM)[None, :]


@triton.jit
def delta_solve_kernel(
    x_ptr, rate_ptr, bias_ptr, inverse_ptr, factors_ptr, chunks_ptr, plane,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """A chunk: (first row, tokens)."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * (KEYS + HEADS * VALUE_DIM + HEADS)
    PARTS: tl.constexpr = CHUNK // PART
    head = tl.program_id(1)
    row = tl.load(chunks_ptr + tl.program_id(0) * 2).to(tl.int64)
    count = tl.load(chunks_ptr + tl.program_id(0) * 2 + 1)
    lines, keys = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
    real = lines < count
    x_ptr += row * WIDTH
    k_ptr = x_ptr + KEYS + head // (HEADS // KEY_HEADS) * KEY_DIM + lines[:, None] * WIDTH + keys[None, :]
    k = tl.load(k_ptr, mask=_inside(real, keys, KEY_DIM, BLOCK_KEY), other=0.0)
    b_ptr = x_ptr + (WIDTH - 2 * HEADS) + head + lines * WIDTH
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr, mask=real, other=0.0).to(tl.float32)))
    a = tl.load(b_ptr + HEADS, mask=real, other=0.0).to(tl.float32)
    decays = tl.where(real, log_decay(a, tl.load(bias_ptr + head), tl.load(rate_ptr + head)), 0.0)
    total = tl.cumsum(decays, 0)
    ahead = lines[:, None] - lines[None, :]
    lower = tl.dot(k, tl.trans(k), input_precision="ieee")
    k_factor = tl.rsqrt(tl.sum(tl.where(ahead == 0, lower, 0.0), 1) + 1e-6)
    place = row * HEADS + head
    factors_ptr += place + lines * HEADS
    tl.store(factors_ptr, total, mask=real)
    tl.store(factors_ptr + plane, k_factor, mask=real)
    decay = tl.exp(tl.where(ahead > 0, total[:, None] - total[None, :], 0.0)) * k_factor[None, :]
    lower = tl.where(ahead > 0, lower * decay * (beta * k_factor)[:, None], 0.0)

    # The parts on the diagonal of I + lower are inverted row by row, all at once: a row of an inverse follows from
    # those above it.
    same = (lines // PART)[:, None] == (lines // PART)[None, :]
    mine = (lines // PART)[:, None, None] == tl.arange(0, PARTS)[None, :, None]
    parts = tl.sum(tl.where(mine, tl.reshape(lower, (CHUNK, PARTS, PART)), 0.0), 1)
    parts = tl.reshape(parts, (PARTS, PART, PART))
    here = tl.arange(0, PART)
    solved = tl.broadcast_to(tl.where(here[:, None] == here[None, :], 1.0, 0.0)[None, :, :], (PARTS, PART, PART))
    for i in range(1, PART):
        factors = tl.sum(tl.where((here == i)[None, :, None], parts, 0.0), 1)
        change = tl.sum(factors[:, :, None] * solved, 1)
        solved = tl.where((here == i)[None, :, None], solved - change[:, None, :], solved)
    solved = tl.broadcast_to(tl.reshape(solved, (CHUNK, PART))[:, None, :], (CHUNK, PARTS, PART))
    solved = tl.where(same, tl.reshape(solved, (CHUNK, CHUNK)), 0.0)

    # (I + lower)^-1 = (I + N)^-1 solved for N = solved * the rest of lower, and (I + N)^-1 = (I - N) (I + N^2): with
    # four parts, N^4 is 0. None of these numbers is large, since no token makes a state larger.
    rest = _product(solved, tl.where(same, 0.0, lower), COMPUTE)
    inverse = solved + _product(_product(rest, rest, COMPUTE), solved, COMPUTE)
    inverse = (inverse - _product(rest, inverse, COMPUTE)) * beta[None, :]
    cells = place * CHUNK + lines[:, None] * (HEADS * CHUNK) + lines[None, :]
    high, low = _halves(inverse, COMPUTE)
    tl.store(inverse_ptr + cells, high, mask=real[:, None])
    tl.store(inverse_ptr + plane * CHUNK + cells, low, mask=real[:, None])


@triton.jit
def delta_scores_kernel(
    x_ptr, scores_ptr, factors_ptr, chunks_ptr, plane, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk: (first row, tokens)."""
    WIDTH: tl.constexpr = 2 * (KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM + HEADS)
    head = tl.program_id(1)
    row = tl.load(chunks_ptr + tl.program_id(0) * 2).to(tl.int64)
    count = tl.load(chunks_ptr + tl.program_id(0) * 2 + 1)
    lines, keys = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
    real = lines < count
    key_head = head // (HEADS // KEY_HEADS) * KEY_DIM
    q_ptr = x_ptr + row * WIDTH + key_head + lines[:, None] * WIDTH + keys[None, :]
    inside = _inside(real, keys, KEY_DIM, BLOCK_KEY)
    q = tl.load(q_ptr, mask=inside, other=0.0)
    k = tl.load(q_ptr + KEY_HEADS * KEY_DIM, mask=inside, other=0.0)
    place = row * HEADS + head
    factors_ptr += place + lines * HEADS
    total = tl.load(factors_ptr, mask=real, other=0.0)
    k_factor = tl.load(factors_ptr + plane, mask=real, other=0.0)
    wide = q.to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale
    tl.store(factors_ptr + 2 * plane, q_factor, mask=real)
    seen = real[:, None] & (lines[:, None] >= lines[None, :])
    decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * q_factor[:, None] * k_factor[None, :]
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * decay, 0.0)
    scores_ptr += place * CHUNK + lines[:, None] * (HEADS * CHUNK) + lines[None, :]
    tl.store(scores_ptr, scores.to(scores_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def _behind(state, keys, change, total, k_factor, lines, last, COMPUTE: tl.constexpr):
    """The state behind the token ``last`` of a chunk."""
    end = tl.sum(tl.where(lines == last, total, 0.0), 0)
    weight = tl.where(lines <= last, tl.exp(tl.minimum(end - total, 0.0)) * k_factor, 0.0)
    return _half_product(keys, change * weight[:, None], state * tl.exp(end), COMPUTE)


@triton.jit(do_not_specialize_on_alignment=["runs_ptr"])  # they follow others
def delta_fold_kernel(
    x_ptr, out_ptr, inverse_ptr, scores_ptr, factors_ptr, state_ptr, runs_ptr, positions_ptr, saves_ptr, plane,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """A run: (first row, tokens, slot)."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * (KEYS + HEADS * VALUE_DIM + HEADS)
    head = tl.program_id(1)
    runs_ptr += tl.program_id(0) * 3
    row = tl.load(runs_ptr).to(tl.int64)
    count = tl.load(runs_ptr + 1)
    slot = tl.load(runs_ptr + 2).to(tl.int64)
    lines, keys = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_real = columns < VALUE_DIM
    cells = keys[:, None] * VALUE_DIM + columns[None, :]
    inside = (keys < KEY_DIM)[:, None] & column_real[None, :]
    state_ptr += head * (KEY_DIM * VALUE_DIM)
    state = tl.zeros([BLOCK_KEY, COLUMNS], tl.float32)
    if tl.load(positions_ptr + row) > 0:
        state = tl.load(state_ptr + slot * (HEADS * KEY_DIM * VALUE_DIM) + cells, mask=inside, other=0.0)
    q_at = lines[:, None] * WIDTH + keys[None, :]
    value_at = lines[:, None] * WIDTH + columns[None, :]
    out_at = lines[:, None] * (HEADS * VALUE_DIM) + columns[None, :]
    solved_at = lines[:, None] * (HEADS * CHUNK) + lines[None, :]
    for start in range(0, count, CHUNK):
        first = row + start
        tokens = tl.minimum(CHUNK, count - start)
        real = lines < tokens
        factor_ptr = factors_ptr + first * HEADS + head + lines * HEADS
        total = tl.load(factor_ptr, mask=real, other=0.0)
        k_factor = tl.load(factor_ptr + plane, mask=real, other=0.0)
        q_factor = tl.load(factor_ptr + 2 * plane, mask=real, other=0.0)
        left = tl.exp(total)

        q_ptr = x_ptr + first * WIDTH + head // (HEADS // KEY_HEADS) * KEY_DIM
        key_inside = _inside(real, keys, KEY_DIM, BLOCK_KEY)
        k = tl.load(q_ptr + KEYS + q_at, mask=key_inside, other=0.0)
        known = _half_product(k, state, tl.zeros([CHUNK, COLUMNS], tl.float32), COMPUTE) * (left * k_factor)[:, None]
        q = tl.load(q_ptr + q_at, mask=key_inside, other=0.0)
        out = tl.dot(q, state.to(COMPUTE), input_precision="ieee") * (left * q_factor)[:, None]

        value_inside = real[:, None] & column_real[None, :]
        value_ptr = x_ptr + first * WIDTH + 2 * KEYS + head * VALUE_DIM
        v = tl.load(value_ptr + value_at, mask=value_inside, other=0.0).to(tl.float32)
        place = (first * HEADS + head) * CHUNK
        inverse = tl.load(inverse_ptr + place + solved_at, mask=real[:, None], other=0.0)
        change = _half_product(inverse, v - known, tl.zeros([CHUNK, COLUMNS], tl.float32), COMPUTE)
        if tl.float32 != COMPUTE:
            inverse = tl.load(inverse_ptr + plane * CHUNK + place + solved_at, mask=real[:, None], other=0.0)
            change = tl.dot(inverse, (v - known).to(COMPUTE), change)
        scores = tl.load(scores_ptr + place + solved_at, mask=real[:, None], other=0.0)
        out = tl.dot(scores, change.to(COMPUTE), out, input_precision="ieee")
        tl.store(out_ptr + (first * HEADS + head) * VALUE_DIM + out_at, out, mask=value_inside)

        turned = tl.trans(k)
        marks = tl.load(saves_ptr + first + lines, mask=real, other=-1)
        if tl.max(marks, 0) >= 0:
            for i in range(tokens):
                saved = tl.load(saves_ptr + first + i).to(tl.int64)
                if saved >= 0:
                    copy = _behind(state, turned, change, total, k_factor, lines, i, COMPUTE)
                    tl.store(state_ptr + saved * (HEADS * KEY_DIM * VALUE_DIM) + cells, copy, mask=inside)
        state = _behind(state, turned, change, total, k_factor, lines, tokens - 1, COMPUTE)
    tl.store(state_ptr + slot * (HEADS * KEY_DIM * VALUE_DIM) + cells, state, mask=inside)


_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def shape_of(op: GatedDelta) -> dict[str, Any]:
    """The constants that every kernel of the rule is specialized for."""
    block = max(_LEAST, triton.next_power_of_2(op.key_dim))
    return {
        "KEY_HEADS": op.key_heads, "HEADS": op.heads, "KEY_DIM": op.key_dim, "VALUE_DIM": op.value_dim,
        "BLOCK_KEY": block,
    }  # fmt: skip


def scores_constants(op: GatedDelta) -> dict[str, Any]:
    return shape_of(op) | {"CHUNK": CHUNK}


def solve_constants(op: GatedDelta) -> dict[str, Any]:
    return scores_constants(op) | {"PART": _PART, "COMPUTE": _COMPUTE[op.x.dtype]}


def fold_constants(op: GatedDelta) -> dict[str, Any]:
    return scores_constants(op) | {"COLUMNS": COLUMNS, "COMPUTE": _COMPUTE[op.x.dtype]}


def fold_stages(gpu: Target) -> int:
    """2, which has a chunk's keys and queries read while the one before is computed, where memory is shared enough."""
    return 2 if gpu.shared_bytes >= _ROOMY else 1


@dataclass(frozen=True)
class Solved:
    """What the kernels of chunks leave for that of runs, of each row and head.

    inverse  [2, rows, heads, CHUNK]: the row of its chunk's inverse times beta, as the sum of two numbers
    scores   [rows, heads, CHUNK]: the factors of u in its output
    factors  float32 [3, rows, heads]: G, and what divides k and q by their lengths, q by the root of its width too

    The first two have the dtype of the inputs.
    """

    inverse: Tensor
    scores: Tensor
    factors: Tensor

    @classmethod
    def take(cls, op: GatedDelta, memory: Workspace, rows: int) -> Solved:
        count = rows * op.heads
        return cls(
            memory.take("delta inverse", 2 * count * CHUNK, op.x.dtype),
            memory.take("delta scores", count * CHUNK, op.x.dtype),
            memory.take("delta factors", 3 * count, torch.float32)[: 3 * count].view(3, rows, op.heads),
        )


def solve(op: GatedDelta, solved: Solved, chunks: Tensor) -> None:
    """Fill ``solved`` for ``chunks`` int32 [n, 2], see ``delta_solve_kernel``."""
    plane, grid = solved.factors.stride(0), (len(chunks), op.heads)
    at(delta_solve_kernel, grid)(
        op.x, op.rate, op.dt_bias, solved.inverse, solved.factors, chunks, plane,
        **solve_constants(op), num_warps=WARPS,
    )  # fmt: skip
    at(delta_scores_kernel, grid)(
        op.x, solved.scores, solved.factors, chunks, plane, op.key_dim**-0.5, **scores_constants(op), num_warps=WARPS
    )


def fold(
    op: GatedDelta, solved: Solved, out: Tensor, runs: Tensor, positions: Tensor, saves: Tensor, gpu: Target
) -> None:  # fmt: skip
    """The outputs, float32 [rows, heads, value_dim], and states of ``runs`` int32 [n, 3], whose chunks are solved."""
    known = fold_constants(op)
    at(delta_fold_kernel, (len(runs), op.heads, triton.cdiv(op.value_dim, known["COLUMNS"])))(
        op.x, out, solved.inverse, solved.scores, solved.factors, op.state, runs, positions, saves,
        solved.factors.stride(0), **known, num_warps=FOLD_THREADS // gpu.warp, num_stages=fold_stages(gpu),
    )  # fmt: skip
