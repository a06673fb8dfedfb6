"""``GpuMemory``: the free memory of a GPU, how much a piece of work takes of it, and how much this process holds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from qserve.runtime.stats import GpuUse


class GpuMemory:
    """The memory of one device, as torch allocates it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._use: GpuUse | None = None
        self._read_at = 0.0

    def free(self) -> int:
        """Bytes that nobody holds; memory that torch had set aside is given back first."""
        torch.cuda.empty_cache()
        return self.available()

    def available(self) -> int:
        """Bytes that nobody holds, not even torch; any thread may ask while steps run."""
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

    def use(self) -> GpuUse:
        """What this process holds: at most a second old, for to ask torch takes a part of a step."""
        now = time.monotonic()
        if self._use is None or now - self._read_at >= 1.0:
            device = self._device
            uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
            self._use = GpuUse(uuid, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
            self._read_at = now
        return self._use
