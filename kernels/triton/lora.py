"""Adapters of rows: ``ops.Lora`` in two kernels, A x and then out + B (A x).

Rows are sorted by adapter on the host (``adapted_rows``). A program multiplies a tile of them by the matrices of one
adapter, which it finds by their addresses. So an adapter takes the memory of its own rank, and it may come and go while
CUDA graphs stay. A few rows would give few programs, so A x is cut along its inputs, too. The second kernel adds those
pieces in order; nothing is added by atomics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from qserve.kernels.lora_slots import LoraTiles, Matrices
from qserve.kernels.ops import Lora
from qserve.kernels.triton.launch import at
from qserve.kernels.triton.staging import Batch
from qserve.kernels.triton.target import Target
from qserve.kernels.triton.workspace import Workspace

TILE = 16
"""Rows of a matrix that lie side by side in memory, as ``LoraTiles`` has them."""
_FIELDS = 4  # of a table: the addresses of A and B, the rank, the bits of the scale
_MOST_PIECES = 16
_MOST_PROGRAMS = 32  # that go through the tiles of rows: a step may have a few tiles or hundreds, in one graph
_WIDEST = 64  # ranks of a program
_OUTS = 128  # columns of a program
_KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class LoraShape:
    """``rows`` of a tile; A x takes ``inputs`` at a time and ``piece`` in a program."""

    rows: int
    inputs: int
    piece: int
    warps: int = 4
    stages: int = 3

    def pieces(self, width: int) -> tuple[int, int]:
        """How many pieces ``width`` inputs have, and the inputs of one."""
        least = triton.cdiv(triton.cdiv(width, _MOST_PIECES), self.inputs) * self.inputs
        piece = max(self.piece, least)
        return triton.cdiv(width, piece), piece


FEW, MANY = LoraShape(16, 128, 512), LoraShape(64, 64, 4096)
ALWAYS = LoraShape(32, 128, 1024)
"""Where a row's sum must not depend on how many others there are."""
_MOST_OF_FEW = 256


def shape_of(rows: int, *, invariant: bool) -> LoraShape:
    """The shape for a step of so many ``rows``."""
    return ALWAYS if invariant else FEW if rows <= _MOST_OF_FEW else MANY


@triton.jit
def _rows_of(tiles_ptr, order_ptr, BLOCK_M: tl.constexpr):
    """Of a tile: the places in the order, the rows, and which of them there are."""
    lanes = tl.arange(0, BLOCK_M)
    real = lanes < tl.load(tiles_ptr + 2)
    places = tl.load(tiles_ptr + 1) + lanes
    return places.to(tl.int64), tl.load(order_ptr + places, mask=real, other=0).to(tl.int64), real


@triton.jit(do_not_specialize=["rows", "tiles"])
def shrink_kernel(
    x_ptr, tiles_ptr, order_ptr, table_ptr, sums_ptr, rows, tiles, stride_x,
    KIND: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums[piece, place, part] = A x of one piece of the inputs, for the rows in their order."""
    BLOCKS: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    part = tl.program_id(1) // BLOCKS
    ranks = tl.program_id(1) % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.program_id(2) * PIECE
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        slot = tl.load(tiles_ptr + tile * 3)
        entry = table_ptr + (tl.maximum(slot, 0) * PARTS + part) * 4
        held = (tl.load(entry + 2).to(tl.int32) + 15) // 16 * 16  # padded with zeros
        if (slot >= 0) & (held > tl.program_id(1) % BLOCKS * BLOCK_R):
            places, lines, real = _rows_of(tiles_ptr + tile * 3, order_ptr, BLOCK_M)
            a_ptr = tl.multiple_of(tl.load(entry).to(tl.pointer_type(KIND)), 16)
            a_ptrs = a_ptr + (ranks // 16) * (WIDTH * 16) + ranks % 16
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for start in range(begin, min(begin + PIECE, WIDTH), BLOCK_K):
                inputs = start + tl.arange(0, BLOCK_K)
                inside = inputs < WIDTH
                x = tl.load(
                    x_ptr + lines[:, None] * stride_x + inputs[None, :], mask=real[:, None] & inside[None, :], other=0.0
                )
                a = tl.load(
                    a_ptrs[None, :] + inputs[:, None] * 16, mask=inside[:, None] & (ranks < held)[None, :], other=0.0
                )
                acc = tl.dot(x, a, acc, input_precision=PRECISION)
            sums = sums_ptr + (tl.program_id(2) * rows + places[:, None]) * (PARTS * RANK) + part * RANK
            tl.store(sums + ranks[None, :], acc, mask=real[:, None] & (ranks < RANK)[None, :])


@triton.jit(do_not_specialize=["rows", "tiles"])
def expand_kernel(
    sums_ptr, tiles_ptr, order_ptr, table_ptr, blocks_ptr, out_ptr, rows, tiles, stride_out,
    KIND: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out += scale * B times the sum of the pieces. A block of columns: (part, number in its part, columns of the part,
    first column of the part), the last two in units of ``UNIT``."""
    blocks_ptr += tl.program_id(1) * 4
    part = tl.load(blocks_ptr)
    columns = tl.load(blocks_ptr + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    size = tl.load(blocks_ptr + 2) * UNIT
    padded = (size + 15) // 16 * 16
    outs = tl.load(blocks_ptr + 3) * UNIT + columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        slot = tl.load(tiles_ptr + tile * 3)
        entry = table_ptr + (tl.maximum(slot, 0) * PARTS + part) * 4
        rank = tl.load(entry + 2).to(tl.int32)
        if (slot >= 0) & (rank > 0):
            places, lines, real = _rows_of(tiles_ptr + tile * 3, order_ptr, BLOCK_M)
            b_ptr = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(KIND)), 16)
            b_ptrs = b_ptr + (columns // 16) * (rank * 16) + columns % 16
            scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(0, rank, BLOCK_R):
                ranks = start + tl.arange(0, BLOCK_R)
                sums = sums_ptr + places[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
                there = real[:, None] & (ranks < (rank + 15) // 16 * 16)[None, :]
                shrunk = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for piece in tl.static_range(PIECES):
                    shrunk += tl.load(sums + piece * rows.to(tl.int64) * (PARTS * RANK), mask=there, other=0.0)
                b = tl.load(
                    b_ptrs[None, :] + ranks[:, None] * 16, mask=(ranks < rank)[:, None] & (columns < padded)[None, :],
                    other=0.0,
                )  # fmt: skip
                acc = tl.dot(shrunk, b.to(tl.float32), acc, input_precision=PRECISION)
            place = out_ptr + lines[:, None] * stride_out + outs[None, :]
            mask = real[:, None] & (columns < size)[None, :]
            value = tl.load(place, mask=mask, other=0.0).to(tl.float32) + scale * acc
            tl.store(place, value.to(out_ptr.dtype.element_ty), mask=mask)


def shrink_constants(op: Lora, shape: LoraShape) -> dict[str, Any]:
    """The constants that the first kernel is specialized for."""
    rank = _padded(op.slots.max_rank)
    return {
        "KIND": _KINDS[op.x.dtype], "PARTS": len(op.slots.parts), "WIDTH": op.x.shape[1], "RANK": rank,
        "PIECE": shape.pieces(op.x.shape[1])[1], "PRECISION": "ieee", "BLOCK_M": shape.rows,
        "BLOCK_R": min(_WIDEST, triton.next_power_of_2(rank)), "BLOCK_K": shape.inputs,
    }  # fmt: skip


def expand_constants(op: Lora, shape: LoraShape, gpu: Target) -> dict[str, Any]:
    """The constants that the second kernel is specialized for. A x is float32, so that no large one overflows; NVIDIA's
    matrix units take it in tf32, which has as many bits as float16."""
    return {
        "KIND": _KINDS[op.x.dtype], "PARTS": len(op.slots.parts), "RANK": _padded(op.slots.max_rank),
        "PIECES": shape.pieces(op.x.shape[1])[0], "UNIT": math.gcd(TILE, *(n for part in op.slots.parts for n in part)),
        "PRECISION": "tf32" if "ptx" in gpu.features else "ieee", "BLOCK_M": shape.rows, "BLOCK_N": _OUTS,
        "BLOCK_R": TILE,
    }  # fmt: skip


def _padded(rank: int) -> int:
    return -(-rank // TILE) * TILE


class PreparedLora:
    """``op`` made ready for steps of at most ``rows``. The matrices of its slots are held on the device in the dtype of
    ``op.x``."""

    def __init__(self, op: Lora, memory: Workspace, rows: int, gpu: Target, *, invariant: bool) -> None:
        self.op, self._invariant, self._device = op, invariant, memory.device
        count, parts = len(op.slots.held), len(op.slots.parts)
        self._held: list[Matrices] = [(None,) * parts] * count
        self._table = torch.zeros(count, parts, _FIELDS, dtype=torch.int64, device=memory.device)
        shapes = {shape_of(each, invariant=invariant) for each in (1, rows)}
        self._known = {shape: (shrink_constants(op, shape), expand_constants(op, shape, gpu)) for shape in shapes}
        sizes = []
        for shape, (known, more) in self._known.items():
            most = min(rows, _MOST_OF_FEW) if shape is FEW else rows
            sizes.append(more["PIECES"] * most * parts * known["RANK"])
        self._sums = memory.take("lora sums", max(sizes), torch.float32)
        unit = more["UNIT"]  # of every shape
        blocks = [
            (part, number, size // unit, first // unit)
            for part, (first, size) in enumerate(op.slots.parts) for number in range(triton.cdiv(size, _OUTS))
        ]  # fmt: skip
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=memory.device)
        for slot, matrices in enumerate(op.slots.held):
            if any(matrices):
                self._put(slot, matrices)
        op.slots.follow(self._put)

    def _put(self, slot: int, matrices: Matrices) -> None:
        held = tuple(tiles and self._moved(tiles) for tiles in matrices)
        entries = [
            (0, 0, 0, 0) if tiles is None else
            (tiles.a.data_ptr(), tiles.b.data_ptr(), tiles.rank, int(np.float32(tiles.scale).view(np.int32)))
            for tiles in held
        ]  # fmt: skip
        self._table[slot] = torch.tensor(entries, dtype=torch.int64)
        self._held[slot] = held  # what was there is free once the steps that were begun have ended

    def _moved(self, tiles: LoraTiles) -> LoraTiles:
        kind = self.op.x.dtype
        return replace(tiles, a=tiles.a.to(self._device, kind), b=tiles.b.to(self._device, kind))

    def run(self, batch: Batch) -> None:
        if not len(batch.adapted_tiles):
            return
        op, shape = self.op, shape_of(batch.tokens, invariant=self._invariant)
        tiles, order, (known, more) = batch.adapted_tiles, batch.adapted_rows, self._known[shape]
        programs = min(len(tiles), _MOST_PROGRAMS)
        grid = programs, known["PARTS"] * triton.cdiv(known["RANK"], known["BLOCK_R"]), more["PIECES"]
        launch = {"num_warps": shape.warps, "num_stages": shape.stages}
        at(shrink_kernel, grid)(
            op.x, tiles, order, self._table, self._sums, batch.tokens, len(tiles), op.x.stride(0), **known, **launch
        )
        at(expand_kernel, (programs, len(self._blocks)))(
            self._sums, tiles, order, self._table, self._blocks, op.out, batch.tokens, len(tiles), op.out.stride(0),
            **more, **launch,
        )  # fmt: skip
