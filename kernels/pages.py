"""Memory in huge pages, where the system gives them: a step reads far more weights than a processor's address caches
cover in small pages. Not for a KV cache: its first tokens would wait for whole huge pages of zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE = 2 << 20
_SLAB = 32 << 20
_LINE = 64


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor that begins a huge page. Memory that nothing touches never becomes resident."""
    count = int(torch.Size(shape).numel())
    if count == 0:
        return torch.empty(*shape, dtype=dtype)
    return _mapped(count * dtype.itemsize).view(dtype)[:count].view(*shape)


def _mapped(size: int) -> Tensor:
    """uint8 [size rounded up], at the beginning of a huge page."""
    size = -(-size // _HUGE) * _HUGE
    # Private: most systems give shared memory no huge pages.
    area = mmap.mmap(-1, size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]


class Arena:
    """Tensors, one behind the other in the order in which they are used."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the arena, which lives as long as the tensor does."""
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        if size == 0:
            return torch.empty(*shape, dtype=dtype)
        if self._used + size > len(self._slab):
            self._slab, self._used = _mapped(max(size, _SLAB)), 0
        place = self._slab[self._used : self._used + size].view(dtype).view(*shape)
        self._used += -(-size // _LINE) * _LINE
        return place
