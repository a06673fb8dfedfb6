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
    """Raises ``UsageError`` or ``CapacityError`` where the ranks of ``config`` cannot serve this."""
    size, asked, shards = config.num_ranks, option(config), config.tensor_parallel_size > 1
    others = {
        "LoRA adapters": config.enable_lora,
        "--kv-offload-memory, --kv-offload-dir and --kv-transfer": bool(config.offload_memory),
        "a model that is changed as it is read": type(source) not in (HFDirectory, GGUFFile),
        f"latent attention, as {model.model_type} has it,": shards and model.latent is not None,
        f"the states that {model.model_type} keeps of sequences": model.delta is not None,
        f"norms of all heads together, as {model.model_type} has them,": shards and model.family.qk_norm == "all",
    }
    for what, is_asked in others.items():
        if is_asked:
            raise UsageError(f"{asked}: {what} cannot be combined with several ranks yet; use one")
    if not hasattr(os, "memfd_create"):
        raise CapacityError(f"{asked}: ranks share memory in a way that this system does not have; use one")
    counts = {"attention heads": model.num_attention_heads} if shards else {"layers": model.num_hidden_layers}
    if shards and model.moe is not None:
        counts["experts"] = model.moe.count
    for what, count in counts.items():
        if count < size:
            raise UsageError(f"{asked}: {source.name} has {count} {what}, and each rank needs one of its own")
    if config.cpu_list is not None and len(config.cpu_list) % size:
        raise UsageError(f"{asked}: --cpu-list names {len(config.cpu_list)} CPUs, which must be as many for each rank")


def option(config: EngineConfig) -> str:
    """What asks for several ranks, as the user wrote it."""
    if config.pipeline_parallel_size > 1:
        return f"--pipeline-parallel-size {config.pipeline_parallel_size}"
    return f"--tensor-parallel-size {config.tensor_parallel_size}"


def rank_of_engine(config: EngineConfig) -> int:
    """The rank that plans and samples: the first shard, or the last stage."""
    return config.pipeline_parallel_size - 1


def require_executor(executor: Executor, config: EngineConfig) -> None:
    """Raises ``UsageError`` where ranks do not compute on this."""
    if executor.name != "native":
        raise UsageError(f"{option(config)} is served by the C kernels of CPUs alone, not by the "
                         f"{executor.name} kernels: choose --kernels native, or start a server for each GPU")


def threads_of(config: EngineConfig, rank: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(threads, CPUs to pin them to) of a rank: its share of the cores where nothing is said."""
    size, cpus = config.num_ranks, config.cpu_list
    if cpus is not None:
        each = len(cpus) // size
        return None, cpus[rank * each : (rank + 1) * each]
    if size == 1 or config.threads is not None:
        return config.threads, None
    return max(1, default_threads() // size), None
