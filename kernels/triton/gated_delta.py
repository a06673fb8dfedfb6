"""The gated delta rule token by token, each state read and written once: ``ops.GatedDelta`` of decodes.

A program has some columns of the state of one head of a run, which do not depend on others. So the results are the same
bits however the tokens of a sequence are cut into runs. ``delta_chunks`` is faster for prompts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from qserve.kernels.ops import GatedDelta
from qserve.kernels.triton import delta_chunks
from qserve.kernels.triton.gated_norm import gated_norm
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.staging import Batch
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.workspace import Workspace

COLUMNS = 32
"""Columns of a state in a program."""


@triton.jit
def delta_rule_kernel(
    x_ptr, out_ptr, rate_ptr, bias_ptr, state_ptr, runs_ptr, positions_ptr, saves_ptr, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A run: (first row, tokens, slot)."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = HEADS * VALUE_DIM
    WIDTH: tl.constexpr = 2 * (KEYS + VALUES + HEADS)
    runs_ptr += tl.program_id(0) * 3
    row = tl.load(runs_ptr).to(tl.int64)
    count = tl.load(runs_ptr + 1)
    slot = tl.load(runs_ptr + 2).to(tl.int64)
    if count > 0:  # else it is padding
        head = tl.program_id(1)
        keys = tl.arange(0, BLOCK_KEY)
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        key_real, real = keys < KEY_DIM, columns < VALUE_DIM
        inside = key_real[:, None] & real[None, :]
        cells = keys[:, None] * VALUE_DIM + columns[None, :]
        place = state_ptr + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + cells
        state = tl.zeros([BLOCK_KEY, COLUMNS], tl.float32)
        if tl.load(positions_ptr + row) > 0:
            state = tl.load(place, mask=inside, other=0.0)
        rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
        q_ptr = x_ptr + row * WIDTH + head // (HEADS // KEY_HEADS) * KEY_DIM + keys
        v_ptr = x_ptr + row * WIDTH + 2 * KEYS + head * VALUE_DIM + columns
        b_ptr = x_ptr + row * WIDTH + 2 * (KEYS + VALUES) + head
        out_at = out_ptr + (row * HEADS + head) * VALUE_DIM + columns
        for token in range(count):
            q = tl.load(q_ptr, mask=key_real, other=0.0).to(tl.float32)
            k = tl.load(q_ptr + KEYS, mask=key_real, other=0.0).to(tl.float32)
            v = tl.load(v_ptr, mask=real, other=0.0).to(tl.float32)
            b, a = tl.load(b_ptr).to(tl.float32), tl.load(b_ptr + HEADS).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            state *= tl.exp(delta_chunks.log_decay(a, bias, rate))
            change = (v - tl.sum(state * k[:, None], 0)) / (1.0 + tl.exp(-b))
            state += k[:, None] * change[None, :]
            tl.store(out_at, tl.sum(state * q[:, None], 0), mask=real)
            saved = tl.load(saves_ptr + row + token).to(tl.int64)
            if saved >= 0:
                tl.store(state_ptr + (saved * HEADS + head) * (KEY_DIM * VALUE_DIM) + cells, state, mask=inside)
            q_ptr += WIDTH
            v_ptr += WIDTH
            b_ptr += WIDTH
            out_at += HEADS * VALUE_DIM
        tl.store(place, state, mask=inside)


def constants(op: GatedDelta) -> dict[str, Any]:
    """The constants that the kernel is specialized for."""
    return delta_chunks.shape_of(op) | {"COLUMNS": COLUMNS}


class PreparedDelta:
    """``ops.GatedDelta`` made ready for runs with at most ``rows`` tokens together."""

    def __init__(self, op: GatedDelta, memory: Workspace, rows: int, gpu: Target, batch_invariant: bool) -> None:
        held = {name: getattr(op, name).to(memory.device) for name in ("rate", "dt_bias", "norm")}
        self.op, self.gpu = replace(op, **held), gpu
        size = rows * op.heads * op.value_dim
        self.values = memory.take("delta values", size, torch.float32)[:size].view(rows, op.heads, op.value_dim)
        self.solved = delta_chunks.Solved.take(op, memory, 0 if batch_invariant else rows)

    def run(self, batch: Batch) -> None:
        op, values, single = self.op, self.values, batch.runs[: batch.single]
        known = constants(op)
        if len(single):
            grid = len(single), op.heads, triton.cdiv(op.value_dim, COLUMNS)
            at(delta_rule_kernel, grid)(
                op.x, values, op.rate, op.dt_bias, op.state, single, batch.positions, batch.saves, op.key_dim**-0.5,
                **known, num_warps=4,
            )  # fmt: skip
        if len(batch.chunks):
            delta_chunks.solve(op, self.solved, batch.chunks)
            several = batch.runs[batch.single :]
            delta_chunks.fold(op, self.solved, values, several, batch.positions, batch.saves, self.gpu)
        gates = op.heads * op.value_dim
        gate = op.x[:, -gates - 2 * op.heads : -2 * op.heads]
        gated_norm(values, gate, op.norm, op.out, op.eps, batch.tokens)
