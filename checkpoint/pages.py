"""Memory in huge pages, where the system gives them: small ones take longer to get than to fill from a file, and a
step reads far more weights than a processor's address caches cover in them. Not for a KV cache: its first tokens would
wait for whole huge pages of zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE = 2 << 20


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor, which begins a huge page if it fills one. Memory that nothing touches never becomes
    resident."""
    count = int(torch.Size(shape).numel())
    size = count * dtype.itemsize
    if size < _HUGE:
        return torch.empty(*shape, dtype=dtype)
    size = -(-size // _HUGE) * _HUGE
    # Private: most systems give shared memory no huge pages.
    area = mmap.mmap(-1, size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size].view(dtype)[:count].view(*shape)
