"""``GpuMemory``: the free memory of a GPU, and how much a piece of work takes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GpuMemory:
    """The memory of one device, as torch allocates it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """Bytes that nobody holds; memory that torch had set aside is given back first."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def total(self) -> int:
        """Bytes that the device has."""
        return torch.cuda.mem_get_info(self._device)[1]

    def passing(self, work: Callable[[], None]) -> int:
        """Do ``work``. Returns the most bytes that it held at a time and gave back: they are free afterwards, but it
        will need them again."""
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
