"""What several ranks serve. The rest is refused by name, before anything is loaded."""

from __future__ import annotations

import os

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import ModelSource
from qserve.kernels.executor import Executor
from qserve.kernels.threads import default_threads
from qserve.runtime.config import EngineConfig
from qserve.runtime.models.config import DecoderConfig


def require_served(source: ModelSource, model: DecoderConfig, config: EngineConfig) -> None:
    """Raises ``UsageError`` or ``CapacityError`` where ``tensor_parallel_size`` ranks cannot serve this."""
    size = config.tensor_parallel_size
    asked = f"--tensor-parallel-size {size}"
    others = {
        "LoRA adapters": config.enable_lora,
        "--kv-offload-memory and --kv-offload-dir": bool(config.offload_memory),
        "a model that is changed as it is read": type(source) not in (HFDirectory, GGUFFile),
        f"latent attention, as {model.model_type} has it,": model.latent is not None,
        f"the states that {model.model_type} keeps of sequences": model.delta is not None,
        f"norms of all heads together, as {model.model_type} has them,": model.family.qk_norm == "all",
    }
    for what, is_asked in others.items():
        if is_asked:
            raise UsageError(f"{asked}: {what} cannot be combined with several ranks yet; use one")
    if not hasattr(os, "memfd_create"):
        raise CapacityError(f"{asked}: ranks share memory in a way that this system does not have; use one")
    counts = {"attention heads": model.num_attention_heads}
    if model.moe is not None:
        counts["experts"] = model.moe.count
    for what, count in counts.items():
        if count < size:
            raise UsageError(f"{asked}: {source.name} has {count} {what}, and each rank needs one of its own")
    if config.cpu_list is not None and len(config.cpu_list) % size:
        raise UsageError(f"{asked}: --cpu-list names {len(config.cpu_list)} CPUs, which must be as many for each rank")


def require_executor(executor: Executor, size: int) -> None:
    """Raises ``UsageError`` where ranks do not compute on this."""
    if executor.name != "native":
        raise UsageError(f"--tensor-parallel-size {size} is served by the C kernels of CPUs alone, not by the "
                         f"{executor.name} kernels: choose --kernels native, or start a server for each GPU")


def threads_of(config: EngineConfig, rank: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(threads, CPUs to pin them to) of a rank: its share of the cores where nothing is said."""
    size, cpus = config.tensor_parallel_size, config.cpu_list
    if cpus is not None:
        each = len(cpus) // size
        return None, cpus[rank * each : (rank + 1) * each]
    if size == 1 or config.threads is not None:
        return config.threads, None
    return max(1, default_threads() // size), None
