"""The metrics of a GPU: what the engine's process holds, and what the driver says."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from qserve.runtime.blocks import BlockManager
from qserve.runtime.gpu_memory import GpuMemory
from qserve.runtime.scheduler import Scheduler, SchedulerConfig
from qserve.runtime.server.telemetry import gpu
from qserve.runtime.server.telemetry.metrics import Metrics
from qserve.runtime.stats import EngineStats, GpuUse

USE = GpuUse("0000-1", allocated=3 << 30, reserved=5 << 30)
NO_GPU = EngineStats.of(Scheduler(SchedulerConfig(max_model_len=8), BlockManager(4, 16)))


def exported(stats: EngineStats) -> dict[str, float]:
    text = Metrics("m").render(stats, up=True, ready=True, step_age=0.0).decode()
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples if ":gpu_" in sample.name}


def test_without_a_gpu_there_are_none() -> None:
    assert exported(NO_GPU) == {}


def test_without_the_driver_what_torch_knows_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu._device.cache_clear()
    assert gpu.read(USE.uuid) is None
    assert exported(replace(NO_GPU, gpu=USE)) == {
        "qserve:gpu_memory_allocated_bytes": 3 << 30, "qserve:gpu_memory_reserved_bytes": 5 << 30,
    }  # fmt: skip


def test_with_the_driver_there_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-0000-1": 7}[uuid],
        nvmlDeviceGetMemoryInfo={7: SimpleNamespace(free=1 << 30, total=80 << 30)}.__getitem__,
        nvmlDeviceGetUtilizationRates={7: SimpleNamespace(gpu=37)}.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    gpu._device.cache_clear()
    found = exported(replace(NO_GPU, gpu=USE))
    assert found["qserve:gpu_utilization_perc"] == 0.37 and found["qserve:gpu_memory_free_bytes"] == 1 << 30
    assert found["qserve:gpu_memory_total_bytes"] == 80 << 30 and len(found) == 5
    gpu._device.cache_clear()


@pytest.mark.gpu
def test_of_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.zeros(1 << 20, device=device)
    use = GpuMemory(device).use()
    assert use.reserved >= use.allocated >= held.nbytes
    state = gpu.read(use.uuid)
    assert state is None or (0 <= state.utilization <= 1 and use.reserved + state.free_bytes <= state.total_bytes)
