"""Rows sorted by the expert that computes them, and where a grouped product finds its rows.

A choice is a row and one of its experts, numbered ``row * top_k + j``. The choices of an expert are sorted by number
and cut into tiles. Nothing waits for the host: there are as many programs as there may be tiles, and those without one
end at once. Nothing is added by atomics, so the order is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from qserve.kernels.triton.launch import at

_BLOCK = 1024


@triton.jit(do_not_specialize=["choices"])
def count_kernel(experts_ptr, counts_ptr, choices, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """How many choices each expert from ``FIRST`` on has."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, choices, BLOCK):
        chosen = tl.load(experts_ptr + start + lanes, mask=start + lanes < choices, other=-1)
        found += (chosen == expert + FIRST).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["choices", "most_tiles"])
def sort_kernel(
    experts_ptr, counts_ptr, order_ptr, tiles_ptr, choices, most_tiles,
    FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The choices of one expert, and its tiles: (expert, first, choices). Experts count from ``FIRST``. The last one
    ends the list with -1."""
    expert = tl.program_id(0)
    lanes, others = tl.arange(0, BLOCK), tl.arange(0, BLOCK_COUNT)
    counts = tl.load(counts_ptr + others, mask=others < COUNT, other=0)
    before = tl.where(others < expert, counts, 0)
    first = tl.sum(before, 0)
    tile = tl.sum(tl.cdiv(before, BLOCK_M), 0)
    mine = tl.load(counts_ptr + expert)
    if mine > 0:
        place = first
        for start in range(0, choices, BLOCK):
            chosen = tl.load(experts_ptr + start + lanes, mask=start + lanes < choices, other=-1)
            hit = (chosen == expert + FIRST).to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(hit, 0) - 1, start + lanes, mask=hit != 0)
            place += tl.sum(hit, 0)
    for start in range(0, mine, BLOCK_M):
        tl.store(tiles_ptr + tile * 3, expert)
        tl.store(tiles_ptr + tile * 3 + 1, first + start)
        tl.store(tiles_ptr + tile * 3 + 2, tl.minimum(mine - start, BLOCK_M))
        tile += 1
    if expert == COUNT - 1:
        for start in range(tile, most_tiles, BLOCK):
            tl.store(tiles_ptr + (start + lanes) * 3, -1, mask=start + lanes < most_tiles)


@triton.jit
def grouped_rows(
    tiles, order, tile, rows, BLOCK_M: tl.constexpr, TOP_K: tl.constexpr, SORTED_X: tl.constexpr
):  # fmt: skip
    """Of a tile: its expert, the rows of x, and those of out, which are ``rows`` where there is none.

    SORTED_X: x lies in the order of the tiles, and out by choices. Otherwise x lies by tokens, and out in the order of
    the tiles.
    """
    lanes = tl.arange(0, BLOCK_M)
    real = lanes < tl.load(tiles + tile * 3 + 2)
    places = tl.load(tiles + tile * 3 + 1) + lanes
    choices = tl.load(order + places, mask=real, other=0)
    x_rows, out_rows = choices // TOP_K, places
    if SORTED_X:
        x_rows, out_rows = places, choices
    return tl.where(real, x_rows, 0), tl.where(real, out_rows, rows)


@dataclass(frozen=True)
class Grouping:
    """Choices sorted by expert: what ``sort_kernel`` leaves, and how many tiles there may be. ``sorted_x``: see
    ``grouped_rows``."""

    tiles: Tensor
    order: Tensor
    choices: int
    most: int
    top_k: int
    sorted_x: bool = False

    def constants(self, each: int) -> dict[str, int]:
        """Those of a product with ``each`` outputs of an expert, padded."""
        return {"EACH": each, "TOP_K": self.top_k, "SORTED_X": self.sorted_x}


NOT_GROUPED: dict[str, int] = {"EACH": 0, "TOP_K": 1, "SORTED_X": False}
"""The same constants of a plain product."""


def most_tiles(choices: int, experts: int, block_m: int) -> int:
    """The most tiles that ``choices`` have, however they fall."""
    return min(choices, experts) + choices // block_m


def sort(
    experts: Tensor, counts: Tensor, order: Tensor, tiles: Tensor, choices: int, block_m: int, first: int = 0
) -> Grouping:
    """The first ``choices`` of ``experts`` int32 [rows, top_k], as far as they are of the experts from ``first`` on;
    -1 is nobody's. ``counts`` int32 [experts], ``order`` int32 [choices] and ``tiles`` int32 [most, 3] are memory."""
    count = len(counts)
    most = most_tiles(choices, count, block_m)
    at(count_kernel, (count,))(experts, counts, choices, first, _BLOCK, num_warps=4)
    at(sort_kernel, (count,))(
        experts, counts, order, tiles, choices, most, first, count, triton.next_power_of_2(count), block_m, _BLOCK,
        num_warps=4,
    )  # fmt: skip
    return Grouping(tiles, order, choices, most, experts.shape[1])
