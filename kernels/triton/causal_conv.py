"""Causal convolutions of channels in place, with the last inputs of each sequence kept: ``ops.CausalConv``.

One program for some channels of a run of tokens. It goes from the last tokens to the first: their inputs are those of
tokens that come before, which it has then not overwritten yet. A sum has one order, however many tokens are taken at a
time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import CausalConv
from qserve.kernels.triton.launch import at

DECODE = {"ROWS": 1, "BLOCK": 256}
PROMPT = {"ROWS": 64, "BLOCK": 64}
"""Tokens that are taken at a time, and channels."""


@triton.jit
def _inputs(
    x_ptr, state_ptr, tokens, inside, earliest, x_stride, CHANNELS: tl.constexpr, HELD: tl.constexpr
):  # fmt: skip
    """Those of ``tokens`` [N] of a run, by channel. Those before it are in the state, or zeros before ``earliest``."""
    here = tl.load(x_ptr + tokens[:, None] * x_stride, mask=inside & (tokens >= 0)[:, None], other=0.0)
    before = (tokens < 0) & (tokens >= earliest)
    held = tl.load(state_ptr + (tokens + HELD)[:, None] * CHANNELS, mask=inside & before[:, None], other=0.0)
    return tl.where((tokens < 0)[:, None], held, here.to(tl.float32))


@triton.jit
def causal_conv_kernel(
    x_ptr, weight_ptr, state_ptr, runs_ptr, positions_ptr, saves_ptr, x_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HELD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A run: (first row, tokens, slot)."""
    HELD: tl.constexpr = WIDTH - 1
    runs_ptr += tl.program_id(0) * 3
    row = tl.load(runs_ptr).to(tl.int64)
    count = tl.load(runs_ptr + 1)
    slot = tl.load(runs_ptr + 2).to(tl.int64)
    if count > 0:  # else it is padding
        channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = channels < CHANNELS
        earliest = tl.where(tl.load(positions_ptr + row) > 0, -HELD, 0)  # of the tokens whose inputs are there
        x_at = x_ptr + row * x_stride + channels
        saves_at = saves_ptr + row
        place = state_ptr + slot * (HELD * CHANNELS) + channels
        kept = tl.arange(0, BLOCK_HELD)
        stored = inside & (kept < HELD)[:, None]
        behind = _inputs(x_at, place, count - HELD + kept, stored, earliest, x_stride, CHANNELS, HELD)
        lines = tl.arange(0, ROWS)
        first = (count - 1) // ROWS * ROWS
        for back in range(0, count, ROWS):
            tokens = first - back + lines
            real = inside & (tokens < count)[:, None]
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for j in tl.static_range(WIDTH):
                weight = tl.load(weight_ptr + j * CHANNELS + channels, mask=inside, other=0.0)
                total += weight * _inputs(x_at, place, tokens - (HELD - j), real, earliest, x_stride, CHANNELS, HELD)
            marks = tl.load(saves_at + tokens, mask=tokens < count, other=-1)
            if tl.max(marks, 0) >= 0:
                for token in range(first - back, tl.minimum(first - back + ROWS, count)):
                    saved = tl.load(saves_at + token).to(tl.int64)
                    if saved >= 0:
                        copy = _inputs(
                            x_at, place, token + 1 - HELD + kept, stored, earliest, x_stride, CHANNELS, HELD
                        )
                        tl.store(state_ptr + (saved * HELD + kept[:, None]) * CHANNELS + channels, copy, mask=stored)
            tl.debug_barrier()  # every thread has read what is overwritten now
            out = total / (1.0 + tl.exp(-total))
            tl.store(x_at + tokens[:, None] * x_stride, out.to(x_ptr.dtype.element_ty), mask=real)
        tl.store(place + kept[:, None] * CHANNELS, behind, mask=stored)


def constants(op: CausalConv, *, decode: bool) -> dict[str, Any]:
    """The constants that the kernel is specialized for."""
    held = triton.next_power_of_2(op.width - 1)
    return {"CHANNELS": op.channels, "WIDTH": op.width, "BLOCK_HELD": held, **(DECODE if decode else PROMPT)}


def causal_conv(op: CausalConv, runs: Tensor, positions: Tensor, saves: Tensor, *, decode: bool) -> None:
    """``op`` for ``runs`` int32 [n, 3], see ``causal_conv_kernel``. ``decode``: each has one token, or none."""
    known = constants(op, decode=decode)
    at(causal_conv_kernel, (len(runs), triton.cdiv(op.channels, known["BLOCK"])))(
        op.x, op.weight, op.state, runs, positions, saves, op.x_stride, **known, num_warps=4
    )
