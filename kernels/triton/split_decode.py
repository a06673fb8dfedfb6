"""Attention of decodes in one kernel: every program has the same number of keys, of one sequence or of several.

The keys of all decodes, end to end, are cut into equal shares (as in Lean Attention, arXiv 2405.10480). Where a cut
falls inside of a sequence, the programs on either side leave partial results, and the last of a sequence's to arrive
merges them in their order. So the result depends on where the cuts are, but not on who is last. How the cuts fall
depends on the whole batch: the invariant mode has the kernels of ``attention`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.ops import Attention
from qserve.kernels.triton.attention import (
    Shape,
    attend,
    constants,
    decode_shape,
    fold_sinks,
    padded_halves,
    resident,
    softmax_scale,
    whole_heads,
)
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.target import Target

FIELDS = 8
"""Numbers of a split: see ``split_decode_kernel``."""
_MERGED = 8192
"""Numbers of partial results that are loaded at a time: 64 registers of a thread of 128."""


@dataclass(frozen=True)
class Sharing:
    """How decodes are shared out: ``programs`` for each key head, with at least ``least`` tiles of ``shape.keys``."""

    shape: Shape
    programs: int
    least: int = 1

    @property
    def slots(self) -> int:
        """Partial results at most: a program has two splits that are not whole sequences, its first and its last."""
        return 2 * self.programs


def sharing(op: Attention, gpu: Target) -> Sharing:
    """The defaults: as many programs as run at a time."""
    shape = decode_shape(op)
    return Sharing(shape, max(1, gpu.sms * resident(op, shape, gpu.shared_bytes) // op.kv_heads))


@triton.jit
def _merge(
    partial_ptr, softmax_ptr, first, count, head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """The partial softmaxes of the GROUP rows of a key head in ``count`` slots from ``first`` on, as one."""
    rows, dims = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for start in range(0, count, MERGED):
        slots = start + tl.arange(0, MERGED)
        there = (slots < count)[:, None] & (rows < GROUP)[None, :]
        heads = (first + slots)[:, None] * HEADS + head * GROUP + rows[None, :]
        # Past the L1 cache, which does not see other programs' stores.
        tops = tl.load(softmax_ptr + heads * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(softmax_ptr + heads * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        cells = heads.to(tl.int64)[:, :, None] * DIM + dims[None, None, :]
        real = there[:, :, None] & (dims < DIM)[None, None, :]
        values = tl.load(partial_ptr + cells, mask=real, other=0.0, cache_modifier=".cg")
        largest = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(tops - safe[None, :])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(totals * weights, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = largest
    if BLOCK_GROUP != GROUP:  # rows of no head have no sum to divide by
        total = tl.where(rows < GROUP, total, 1.0)
    return top, total, acc


@triton.jit
def _finish(
    out_ptr, v_scale_ptr, sinks_ptr, row, head, top, total, acc,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Store the attention of the GROUP first of ROWS rows of a key head, from their whole softmax."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    are_dims = dims < DIM
    if PACKED and BLOCK_DIM != DIM:
        dims, are_dims = padded_halves(BLOCK_DIM, DIM)
    mine = rows < GROUP
    if sinks_ptr is not None:
        top, total, acc = fold_sinks(top, total, acc, sinks_ptr, head * GROUP + rows, mine)
    weight = 1.0
    if v_scale_ptr is not None:
        weight = tl.load(v_scale_ptr + head)
    out = acc * (weight / total)[:, None]
    places = row * (HEADS * DIM) + (head * GROUP + rows)[:, None] * DIM + dims[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mine[:, None] & are_dims[None, :])


@triton.jit
def split_decode_kernel(
    qkv_ptr, out_ptr, partial_ptr, softmax_ptr, arrived_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    splits_ptr, positions_ptr, staged_ptr, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, COMPUTE: tl.constexpr,
    INTEGERS: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """A split: (row or -1, begin and end of its keys, where its block table begins among the staged numbers, the first
    slot of its sequence, its place there, the number of its sequence's splits, the next split of the program or -1).

    ``begin`` is a multiple of KEYS. The first split of a program is the one with its number. ``arrived`` [slots,
    KV_HEADS] counts the splits of a sequence, at its first slot; it is zero before and after.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    are_dims = dims < DIM
    if PACKED and BLOCK_DIM != DIM:
        dims, are_dims = padded_halves(BLOCK_DIM, DIM)
    real = (rows < GROUP)[:, None] & are_dims[None, :]
    columns = (head * GROUP + rows)[:, None] * DIM + dims[None, :]
    while split >= 0:
        fields_ptr = splits_ptr + split * 8
        row = tl.load(fields_ptr).to(tl.int64)
        begin = tl.load(fields_ptr + 1)
        end = tl.load(fields_ptr + 2)
        table_ptr = staged_ptr + tl.load(fields_ptr + 3)
        first = tl.load(fields_ptr + 4)
        place = tl.load(fields_ptr + 5)
        count = tl.load(fields_ptr + 6)
        split = tl.load(fields_ptr + 7)
        if row >= 0:
            q_ptr = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * DIM)
            q = tl.load(q_ptr + columns, mask=real, other=0.0).to(COMPUTE)
            k_scale = scale
            if k_scale_ptr is not None:
                k_scale = scale * tl.load(k_scale_ptr + head)
            last = end - 1
            if WINDOW > 0:
                last = tl.load(positions_ptr + row)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_DIM // 2 if PAIRS or PACKED else BLOCK_DIM], tl.float32)
            top, total, acc, odd = attend(
                top, total, acc, acc, q, last + rows * 0, k_ptr, v_ptr, table_ptr, head, begin, end, k_scale,
                KV_HEADS, DIM, BLOCK_DIM, KEYS, WINDOW, SOFTCAP, PAGE, INTEGERS, PACKED, PAIRS, PTX, True,
            )  # fmt: skip
            acc = whole_heads(acc, odd, PAIRS, PACKED)
            if count == 1:
                _finish(
                    out_ptr, v_scale_ptr, sinks_ptr, row, head, top, total, acc,
                    HEADS, DIM, BLOCK_DIM, GROUP, ROWS, PACKED,
                )  # fmt: skip
            else:
                heads = (first + place) * HEADS + head * GROUP + rows
                tl.store(partial_ptr + heads.to(tl.int64)[:, None] * DIM + dims[None, :], acc, mask=real)
                tl.store(softmax_ptr + heads * 2, top, mask=rows < GROUP)
                tl.store(softmax_ptr + heads * 2 + 1, total, mask=rows < GROUP)
                tl.debug_barrier()  # the stores of all threads come before the one arrival
                arrived = arrived_ptr + first * KV_HEADS + head
                if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1:
                    tl.store(arrived, 0)  # for the next launch
                    whole_top, whole_total, whole_acc = _merge(
                        partial_ptr, softmax_ptr, first, count, head, HEADS, DIM, BLOCK_DIM, GROUP, BLOCK_GROUP, MERGED
                    )
                    _finish(
                        out_ptr, v_scale_ptr, sinks_ptr, row, head, whole_top, whole_total, whole_acc,
                        HEADS, DIM, BLOCK_DIM, GROUP, BLOCK_GROUP, False,
                    )  # fmt: skip


def split_constants(op: Attention, shape: Shape) -> dict[str, object]:
    """The constants that the kernel is specialized for."""
    known = constants(op, shape)
    del known["CHUNK"]
    group: int = triton.next_power_of_2(op.heads // op.kv_heads)
    merged = _MERGED if known["BLOCK_DIM"] == op.head_dim else _MERGED // 2  # masks take registers, too
    if op.softcap:
        merged //= 4  # with more, two numbers of a program spill
    return known | {"BLOCK_GROUP": group, "MERGED": max(1, min(16, merged // (group * known["BLOCK_DIM"])))}


def attend_splits(
    op: Attention, sharing: Sharing, partial: Tensor, softmax: Tensor, arrived: Tensor, splits: Tensor,
    positions: Tensor, staged: Tensor,
) -> None:  # fmt: skip
    """The decodes whose keys ``splits`` int32 [*, 8] shares out, see ``split_decode_kernel``.

    ``partial`` float32 [slots, heads, head_dim] and ``softmax`` float32 [slots, heads, 2] hold partial results,
    ``arrived`` int32 [slots * kv_heads] is zero before and after.
    """
    shape = sharing.shape
    values = op.v_cache.view(torch.int16) if shape.pairs else op.v_cache
    at(split_decode_kernel, (sharing.programs * op.kv_heads,))(
        op.qkv, op.out, partial, softmax, arrived, op.k_cache, values, op.k_scale, op.v_scale, op.sinks, splits,
        positions, staged, softmax_scale(op), **split_constants(op, shape), num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip
