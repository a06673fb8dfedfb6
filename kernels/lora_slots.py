"""``LoraSlots``: the adapters of the linears that share an input, in numbered slots, as products read them.

A slot is filled and emptied between two steps, and the operation that reads it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qserve.checkpoint.lora import LoraWeight
from qserve.kernels.arena import Arena, room
from qserve.kernels.prepack import float_tiles, rows_of_tiles

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # as csrc/qserve.h numbers them
# ``qs_adapter`` of the same file
_ENTRY = np.dtype([("a", "u8"), ("b", "u8"), ("rank", "i4"), ("a_dtype", "i4"), ("b_dtype", "i4"), ("scale", "f4")])


@dataclass(frozen=True)
class LoraTiles:
    """The matrices of an adapter's linear in tiles of 16 rows: a [rank / 16, in, 16], b [out / 16, rank, 16]."""

    a: Tensor
    b: Tensor
    rank: int
    scale: float

    @classmethod
    def of(cls, weight: LoraWeight, order: Tensor | None = None, inputs: slice = slice(None)) -> LoraTiles:
        """``order``: int64, the outputs that are wanted, and ``inputs``, of those that the linear has. Each matrix has
        the narrowest dtype that holds its numbers exactly, so nothing is rounded."""
        b = weight.b if order is None else weight.b[order]
        return cls(float_tiles(_narrowed(weight.a[:, inputs])), float_tiles(_narrowed(b)), weight.rank, weight.scale)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def matrices(self, out: int) -> tuple[Tensor, Tensor]:
        """float32 [rank, in] and [out, rank]."""
        return rows_of_tiles(self.a, self.rank).float(), rows_of_tiles(self.b, out).float()


def _narrowed(matrix: Tensor) -> Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(matrix.to(dtype).float(), matrix.float()):
            return matrix.to(dtype)
    return matrix


Matrices = tuple[LoraTiles | None, ...]
"""An adapter's matrices for linears that share an input; None for one that it leaves as it is."""


def side_by_side(products: Sequence[Matrices]) -> tuple[Matrices, ...]:
    """``products`` in memory of their own, in the order in which a step reads it: the a of linears that share an input,
    then their b."""
    matrices = [matrix for held in products for tiles in held if tiles is not None for matrix in (tiles.a, tiles.b)]
    take = Arena(sum(room(matrix.nbytes) for matrix in matrices)).take

    def moved(matrix: Tensor) -> Tensor:
        return take(matrix.shape, matrix.dtype).copy_(matrix)

    def placed(held: Matrices) -> Matrices:
        first = [tiles and replace(tiles, a=moved(tiles.a)) for tiles in held]
        return tuple(tiles and replace(tiles, b=moved(tiles.b)) for tiles in first)

    return tuple(map(placed, products))


class LoraSlots:
    """``parts``: (first column, columns) of the output for each linear. ``held[slot]`` has an adapter's matrices for
    each, or None where it leaves that linear as it is; ``table`` is the same for the C kernels."""

    def __init__(self, parts: Sequence[tuple[int, int]], count: int, max_rank: int) -> None:
        self.parts, self.max_rank = tuple(parts), max_rank
        self.held: list[Matrices] = [(None,) * len(self.parts)] * count
        self.table = torch.zeros(count, len(self.parts) * _ENTRY.itemsize, dtype=torch.uint8)
        self._entries = self.table.numpy().view(_ENTRY)
        self._followers: list[Callable[[int, Matrices], None]] = []

    def follow(self, put: Callable[[int, Matrices], None]) -> None:
        """From now on ``put`` gets each slot that is filled or emptied, and its matrices."""
        self._followers.append(put)

    def put(self, slot: int, matrices: Sequence[LoraTiles | None]) -> None:
        """Fill a slot; ``matrices``: one for each part."""
        self.held[slot] = tuple(matrices)
        for part, tiles in enumerate(matrices):
            self._entries[slot, part] = (0, 0, 0, 0, 0, 0.0) if tiles is None else (
                tiles.a.data_ptr(), tiles.b.data_ptr(), tiles.rank, _FLOATS.index(tiles.a.dtype),
                _FLOATS.index(tiles.b.dtype), tiles.scale,
            )  # fmt: skip
        for put in self._followers:
            put(slot, self.held[slot])

    def clear(self, slot: int) -> None:
        """Empty a slot that no token of a later step has."""
        self.put(slot, (None,) * len(self.parts))
