"""Every operation in plain torch: slow, obvious, and what the fast kernels are tested against.

It computes packed products from dequantized weights and does not round activations, so it is also the measure
of what that rounding costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.packed import PackedWeight
from qserve.kernels.ops import (
    BLOCK_SIZE,
    Argmax,
    Attention,
    Embed,
    Gather,
    Linear,
    LogSoftmax,
    Op,
    RMSNorm,
    RopeKV,
    SiluMul,
    Step,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 [..., width]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]; cosine, sine [tokens, rotary_dim / 2]; the rest of head_dim passes through."""
    half = cosine.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cosine[:, None], sine[:, None]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def _rope_kv(op: RopeKV, step: Step) -> None:
    tokens = len(step.token_ids)
    row = op.qkv[:tokens].view(tokens, op.heads + 2 * op.kv_heads, op.head_dim)
    q, k, v = row.split([op.heads, op.kv_heads, op.kv_heads], 1)
    if op.q_norm is not None:
        q = rms_norm(q, op.q_norm, op.eps)
    if op.k_norm is not None:
        k = rms_norm(k, op.k_norm, op.eps)
    positions = step.positions.long()
    k = rotate(k, op.cosine[positions], op.sine[positions])
    row[:, : op.heads] = rotate(q, op.cosine[positions], op.sine[positions])
    row[:, op.heads : op.heads + op.kv_heads] = k
    block, offset = step.slots.long() // BLOCK_SIZE, step.slots.long() % BLOCK_SIZE
    op.k_cache[block, :, :, offset] = k.to(op.k_cache.dtype)
    op.v_cache[block, :, offset] = v.to(op.v_cache.dtype)


def _attention(op: Attention, step: Step) -> None:
    group = op.heads // op.kv_heads
    starts = step.seq_start.tolist()
    for s, (begin, end) in enumerate(pairwise(starts)):
        positions = step.positions[begin:end].long()
        length = int(positions[-1]) + 1
        blocks = step.block_tables[s, : -(-length // BLOCK_SIZE)].long()
        k = op.k_cache[blocks].permute(1, 0, 3, 2).reshape(op.kv_heads, -1, op.head_dim)[:, :length].float()
        v = op.v_cache[blocks].permute(1, 0, 2, 3).reshape(op.kv_heads, -1, op.head_dim)[:, :length].float()
        q = op.qkv[begin:end, : op.heads * op.head_dim].view(-1, op.heads, op.head_dim).transpose(0, 1)
        keys = torch.arange(length)
        seen = keys <= positions[:, None]
        if op.window > 0:
            seen &= keys > positions[:, None] - op.window
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * op.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = weights @ v.repeat_interleave(group, 0)
        op.out[begin:end] = out.transpose(0, 1).reshape(end - begin, -1)


class _ReferenceProgram:
    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Linear):
                weight = op.weight.dequantize() if isinstance(op.weight, PackedWeight) else op.weight.float()
                op = replace(op, weight=weight, bias=None if op.bias is None else op.bias.float())
            self.ops.append(op)

    def run(self, step: Step) -> None:
        tokens, logits = len(step.token_ids), len(step.logit_rows)
        for op in self.ops:
            n = logits if getattr(op, "rows", "tokens") == "logits" else tokens
            match op:
                case Embed():
                    op.out[:n] = op.table[step.token_ids.long()].float()
                case RMSNorm():
                    op.out[:n] = rms_norm(op.x[:n], op.weight, op.eps)
                case Linear():
                    assert isinstance(op.weight, Tensor)
                    y = F.linear(op.x[:n], op.weight, op.bias)
                    op.out[:n] = op.out[:n] + y if op.accumulate else y
                case RopeKV():
                    _rope_kv(op, step)
                case Attention():
                    _attention(op, step)
                case SiluMul():
                    gate, up = op.gate_up[:n].chunk(2, -1)
                    op.out[:n] = F.silu(gate) * up
                case Gather():
                    op.out[:n] = op.x[step.logit_rows.long()]
                case Argmax():
                    bad = op.x[:n].isnan().any(-1)
                    op.out[:n] = torch.where(bad, -1, op.x[:n].argmax(-1)).int()
                case LogSoftmax():
                    op.x[:n] = op.x[:n].log_softmax(-1)


class ReferenceExecutor:
    """Runs anywhere torch runs. Its products change their last bits with the batch size."""

    name = "reference"
    batch_invariant = False

    def supports(self, op: Op) -> str | None:
        return None

    def program(self, max_rows: int) -> _ReferenceProgram:
        return _ReferenceProgram()
