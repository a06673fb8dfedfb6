"""``GpuMemory``: what is free on a GPU, and what a piece of work takes of it. Knows bytes; does not know models."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GpuMemory:
    """Of one device, as torch allocates it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """Bytes that nobody holds; what torch had set aside for later is given back."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def passing(self, work: Callable[[], None]) -> int:
        """Do ``work``. The most bytes that it had allocated at a time and gave back: it will need them again, though
        they are free behind it."""
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
