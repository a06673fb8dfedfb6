"""The experts that each token chooses: one program per token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import Route
from qserve.kernels.triton.launch import at

_TAKEN: tl.constexpr = tl.constexpr(-(1 << 31))
_LEFT_OUT: tl.constexpr = tl.constexpr(-(1 << 31) + 0x7FFFFF)
"""The order of -inf."""


@triton.jit
def _order(x):
    """Integers in the order of float32 numbers, NaN above all; two zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, slots_ptr, experts_ptr, weights_ptr, scale,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, BLOCK_TOP: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Experts lie by group, each group padded to BLOCK_SIZE."""
    SIZE: tl.constexpr = COUNT // GROUPS
    BLOCK: tl.constexpr = BLOCK_GROUPS * BLOCK_SIZE
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    expert = lanes // BLOCK_SIZE * SIZE + lanes % BLOCK_SIZE
    inside = (lanes % BLOCK_SIZE < SIZE) & (lanes < GROUPS * BLOCK_SIZE)
    logits = tl.load(logits_ptr + row * COUNT + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=inside, other=0.0)
    order = tl.where(inside, _order(choice), _TAKEN)
    if GROUPS > 1:
        groups = tl.arange(0, BLOCK_GROUPS)
        left = tl.reshape(order, (BLOCK_GROUPS, BLOCK_SIZE))
        by_group = tl.reshape(choice, (BLOCK_GROUPS, BLOCK_SIZE))
        places = tl.arange(0, BLOCK_SIZE)[None, :]
        sums = tl.zeros([BLOCK_GROUPS], tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best = places == tl.argmax(left, 1)[:, None]
            sums += tl.sum(tl.where(best, by_group, 0.0), 1)
            left = tl.where(best, _TAKEN, left)
        rank = tl.where(groups < GROUPS, _order(sums), _TAKEN)
        kept = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = groups == tl.argmax(rank, 0)
            kept = kept | best_group
            rank = tl.where(best_group, _TAKEN, rank)
        kept_lanes = tl.reshape(tl.broadcast_to(kept[:, None], (BLOCK_GROUPS, BLOCK_SIZE)), (BLOCK,))
        order = tl.where(kept_lanes | (order == _TAKEN), order, _LEFT_OUT)
    tops = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([BLOCK_TOP], tl.int32)
    weights = tl.zeros([BLOCK_TOP], tl.float32)
    total = 0.0
    for j in tl.static_range(TOP_K):
        best_expert = lanes == tl.argmax(order, 0)
        order = tl.where(best_expert, _TAKEN, order)
        weight = tl.sum(tl.where(best_expert, scores, 0.0), 0)
        total += weight
        chosen = tl.where(tops == j, tl.sum(tl.where(best_expert, expert, 0), 0), chosen)
        weights = tl.where(tops == j, weight, weights)
    if RENORMALIZE:
        weights = weights / tl.where(total < 1e-20, 1e-20, total)
    if tl.load(slots_ptr + row) < 0:
        chosen = tl.full([BLOCK_TOP], -1, tl.int32)
    tl.store(experts_ptr + row * TOP_K + tops, chosen, mask=tops < TOP_K)
    tl.store(weights_ptr + row * TOP_K + tops, weights * scale, mask=tops < TOP_K)


def route(op: Route, bias: Tensor | None, slots: Tensor, rows: int) -> None:
    """``op`` for the first ``rows``. A row whose slot is below 0 is padding: it chooses -1, so that no expert is read
    for it."""
    at(route_kernel, (rows,))(
        op.logits, bias, slots, op.experts, op.weights, op.scale,
        op.count, op.groups, triton.next_power_of_2(op.groups), triton.next_power_of_2(op.count // op.groups),
        op.top_k, op.top_groups, op.group_best, triton.next_power_of_2(op.top_k), op.sigmoid, op.renormalize,
        num_warps=1 if op.count <= 256 else 4,
    )  # fmt: skip
