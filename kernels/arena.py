"""``Arena``: the memory of tiles, one behind the other in the order in which they are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.checkpoint import pages

_SLAB = 32 << 20
_LINE = 64


class Arena:
    """Slabs of ``size`` bytes, or what a tensor needs, in huge pages. A slab lives as long as a tensor in it."""

    def __init__(self, size: int = _SLAB) -> None:
        self._size = size
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, behind the one before."""
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        if size == 0:
            return torch.empty(*shape, dtype=dtype)
        if self._used + size > len(self._slab):
            self._slab, self._used = pages.empty((max(size, self._size),), torch.uint8), 0
        place = self._slab[self._used : self._used + size].view(dtype).view(*shape)
        self._used += room(size)
        return place


def room(size: int) -> int:
    """Bytes that a tensor of ``size`` takes in a slab."""
    return -(-size // _LINE) * _LINE
