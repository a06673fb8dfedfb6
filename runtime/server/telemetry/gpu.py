"""How busy a GPU is and how much of its memory nobody holds, as its driver says (NVML)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class GpuState:
    """A GPU as all processes together use it. ``utilization``: the share of the last moment in which a kernel ran."""

    utilization: float
    free_bytes: int
    total_bytes: int


def read(uuid: str) -> GpuState | None:
    """The state of a GPU now, in any process; None where the driver or its package (``nvidia-ml-py``) does not say."""
    try:
        nvml, device = _device(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        return GpuState(nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100, memory.free, memory.total)
    except Exception:  # every failure is a class of its own there, and none is worth a scrape
        return None


@lru_cache
def _device(uuid: str) -> tuple[Any, Any]:
    nvml = import_module("pynvml")
    nvml.nvmlInit()
    return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
