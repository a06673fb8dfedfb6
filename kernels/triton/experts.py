"""The experts of a mixture: sort the choices, two grouped products with an activation between, and add in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.checkpoint.trellis import PackedTrellis
from qserve.kernels import ops
from qserve.kernels.triton import linear
from qserve.kernels.triton.eight_bit import EightBit
from qserve.kernels.triton.grouped import Grouping, most_tiles, sort
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.pointwise import activation
from qserve.kernels.triton.prepack import PAD_N, PAD_STREAMS, SLICES, field_bits, padded_outputs
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.weight_only import MOST_PLACES, WeightOnly
from qserve.kernels.triton.workspace import Workspace

_BLOCK = 1024
_LEAST_TILE = 16
_MOST = 1024
"""Experts whose counts one program holds."""


@triton.jit
def _term(
    parts_ptr, choice, experts_ptr, bias_ptr, columns, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr
):
    """parts[choice] + bias of its expert, and zeros for an expert that is not here."""
    inside = columns < WIDTH
    if experts_ptr is not None:
        expert = tl.load(experts_ptr + choice) - FIRST
        inside = columns < tl.where((expert >= 0) & (expert < COUNT), WIDTH, 0)
    term = tl.load(parts_ptr + choice * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        term += tl.load(bias_ptr + expert.to(tl.int64) * WIDTH + columns, mask=inside, other=0.0)
    return term


@triton.jit
def terms_kernel(
    parts_ptr, terms_ptr, experts_ptr, bias_ptr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """terms[i] = parts[i] + the bias of expert ``experts[i]``, and zeros where it is not here."""
    choice = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    term = _term(parts_ptr, choice, experts_ptr, bias_ptr, columns, FIRST, COUNT, WIDTH)
    tl.store(terms_ptr + choice * WIDTH + columns, term, mask=columns < WIDTH)


@triton.jit
def combine_kernel(
    parts_ptr, weights_ptr, out_ptr, experts_ptr, bias_ptr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    TOP_K: tl.constexpr, ACCUMULATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r] = the sum of weights[r, j] * (parts[r, j] + bias[experts[r, j]]) in the order of j, or added to it. Where
    there are ``experts``, only those of the ``COUNT`` from ``FIRST`` on add something."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        choice = row * TOP_K + j
        part = _term(parts_ptr, choice, experts_ptr, bias_ptr, columns, FIRST, COUNT, WIDTH)
        total += tl.load(weights_ptr + choice) * part
    at = out_ptr + row * WIDTH + columns
    if ACCUMULATE:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_bias_kernel(
    out_ptr, order_ptr, experts_ptr, bias_ptr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] += bias of the expert of choice order[i]. Behind the last real choice both are rubbish."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    choice = tl.minimum(tl.maximum(tl.load(order_ptr + row), 0), tl.num_programs(0) - 1)
    expert = tl.minimum(tl.maximum(tl.load(experts_ptr + choice) - FIRST, 0), COUNT - 1).to(tl.int64)
    at = out_ptr + row * WIDTH + columns
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(bias_ptr + expert * WIDTH + columns, mask=inside, other=0.0)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


def supports(op: ops.Experts, gpu: Target) -> str | None:
    """None, or why no kernel here computes ``op`` on ``gpu``."""
    if len(op.gate_up) > _MOST:
        return f"{len(op.gate_up)} experts have no Triton kernel: at most {_MOST}"
    widest = max(op.gate_up_out.stride(0), op.x.stride(0), op.parts.stride(0))
    if len(op.parts) * widest > MOST_PLACES:
        return f"{len(op.parts):,} choices of {widest:,} numbers: {MOST_PLACES:,} are the most that the kernel counts"
    for weights in (op.gate_up, op.down):
        if len(set(map(_kind, weights))) > 1:
            return "experts that differ in their schemes have no Triton kernel"
        packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        reason = _unsupported(packed, gpu) if packed else None
        out, inp = packed[0].stored.shape if packed else _dense(weights)[0].shape
        bits = field_bits(packed[0].scheme) if packed else 16
        words = len(weights) * -(-out // PAD_N) * PAD_N * inp * bits // 16
        if reason is None and words >= linear.MOST_WORDS:
            reason = f"experts of {words:,} words of 16 bits: {linear.MOST_WORDS:,} are the most that the kernel counts"
        if reason is not None:
            return reason
    return None


def _unsupported(weights: list[QuantizedWeight], gpu: Target) -> str | None:
    first = weights[0]
    if any(weight.g_idx is not None for weight in weights):
        return "experts with groups out of order have no Triton kernel"
    if first.input_scale is not None:
        return "experts with static input scales have no Triton kernel"
    width = first.scheme.group_width(first.in_features)
    if first.scheme.groups(first.in_features) > 1 and (width & (width - 1) or width < SLICES[-1]):
        return f"experts with groups of {width} have no Triton kernel: a power of two from {SLICES[-1]} on has"
    return linear.supports(first, gpu)


def _kind(weight: Tensor | QuantizedWeight) -> object:
    return weight.dtype if isinstance(weight, Tensor) else (weight.scheme, weight.activations, weight.zeros is None)


def _dense(weights: Iterable[Tensor | QuantizedWeight]) -> list[Tensor]:
    return [weight for weight in weights if isinstance(weight, Tensor)]


def _joined(weights: tuple[Tensor | QuantizedWeight, ...]) -> Tensor | QuantizedWeight:
    """One weight, the outputs of each expert padded as those of a weight of its own."""
    padded = [_padded(weight) for weight in weights]
    packed = [weight for weight in padded if isinstance(weight, QuantizedWeight)]
    return concat_rows(packed) if packed else torch.cat(_dense(padded))


def _padded(weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    if isinstance(weight, Tensor):
        return F.pad(weight, (0, 0, 0, -len(weight) % PAD_N))
    more = (0, 0, 0, -weight.out_features % (PAD_STREAMS if weight.scheme.grid is TRELLIS else PAD_N))
    if isinstance(weight.stored, PackedTrellis):
        stored: Tensor | PackedTrellis = padded_outputs(weight.stored, weight.out_features + more[-1])
    else:
        stored = F.pad(weight.codes, more)
    zeros = None if weight.zeros is None else F.pad(weight.zeros, more)
    return replace(weight, stored=stored, scales=F.pad(weight.scales, more), zeros=zeros)


class PreparedExperts:
    """``ops.Experts`` made ready; all experts of a projection are one weight."""

    def __init__(self, op: ops.Experts, memory: Workspace, batch_invariant: bool) -> None:
        def product(x: Tensor, weights: tuple[Tensor | QuantizedWeight, ...], out: Tensor) -> WeightOnly | EightBit:
            rounds = isinstance(weights[0], QuantizedWeight) and weights[0].activations is not None
            made = (EightBit if rounds else WeightOnly)(
                ops.Linear(x, _joined(weights), out), memory, batch_invariant, len(weights)
            )
            made.op = replace(made.op, weight=torch.empty(0))  # else the original weights would stay in memory too
            return made

        self.up = product(op.x, op.gate_up, op.gate_up_out)
        self.down = product(op.activated, op.down, op.parts)
        self.rounded = self.down.take_rounded() if isinstance(self.down, EightBit) else None
        count, choices = len(op.gate_up), op.experts.numel()
        self.counts = memory.take("expert counts", count, torch.int32)[:count]
        self.order = memory.take("expert order", choices, torch.int32)
        self.tiles = memory.take("expert tiles", 3 * most_tiles(choices, count, _LEAST_TILE), torch.int32)
        biases = {name: x.to(memory.device, torch.float32).contiguous() for name in ("gate_up_bias", "down_bias")
                  if (x := getattr(op, name)) is not None}  # fmt: skip
        self.op = replace(op, gate_up=(), down=(), **biases)

    def run(self, rows: int) -> None:
        """``op`` for the first ``rows``. Nothing is computed for an expert of -1, which adds nothing."""
        op = self.op
        choices, count = rows * op.experts.shape[1], len(self.counts)
        each = -(-choices // count)
        up, down = self.up.config_grouped(each), self.down.config_grouped(each)
        if up.block_m != down.block_m:  # of another kernel; both go by the same tiles
            each = min(up.block_m, down.block_m)
            up, down = self.up.config_grouped(each), self.down.config_grouped(each)
        assert up.block_m == down.block_m
        grouping: Grouping = sort(op.experts, self.counts, self.order, self.tiles, choices, up.block_m, op.first)
        self.up.run_grouped(rows, grouping, up)
        if op.gate_up_bias is not None:
            both = op.gate_up_out.shape[1]
            at(add_bias_kernel, (choices, triton.cdiv(both, _BLOCK)))(
                op.gate_up_out, self.order, op.experts, op.gate_up_bias, op.first, count, both, _BLOCK, num_warps=4
            )
        activation(ops.Activation(op.gate_up_out, op.activated, op.function, gated=True), choices, self.rounded)
        self.down.run_grouped(choices, replace(grouping, sorted_x=True), down)
        width = op.out.shape[1]
        if op.terms is not None:
            at(terms_kernel, (choices, triton.cdiv(width, _BLOCK)))(
                op.parts, op.terms, op.experts, op.down_bias, op.first, count, width, _BLOCK, num_warps=4
            )
            return
        at(combine_kernel, (rows, triton.cdiv(width, _BLOCK)))(
            op.parts, op.weights, op.out, op.experts, op.down_bias, op.first, count, op.experts.shape[1],
            op.accumulate, width, _BLOCK, num_warps=4,
        )  # fmt: skip


def sum_terms(op: ops.ExpertSum, rows: int) -> None:
    """``op`` for the first ``rows``."""
    width = op.out.shape[1]
    at(combine_kernel, (rows, triton.cdiv(width, _BLOCK)))(
        op.terms, op.weights, op.out, None, None, 0, 0, op.weights.shape[1], op.accumulate, width, _BLOCK, num_warps=4
    )
