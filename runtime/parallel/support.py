"""What several ranks serve. The rest is refused by name, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import replace

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import ModelSource
from qserve.kernels import process_group
from qserve.kernels.executor import Executor
from qserve.kernels.threads import default_threads
from qserve.runtime.config import EngineConfig
from qserve.runtime.models.config import DecoderConfig
from qserve.runtime.parallel.group import Exchange
from qserve.runtime.parallel.shard import Shard


def require_served(source: ModelSource, model: DecoderConfig, config: EngineConfig, executor: Executor) -> None:
    """Raises ``UsageError`` or ``CapacityError`` where the ranks of ``config`` cannot serve this on ``executor``."""
    size, stages, asked = config.tensor_parallel_size, config.pipeline_parallel_size, option(config)
    on_gpus = executor.name == "triton"
    others = {
        "--kv-transfer": config.kv_transfer and stages > 1,
        "a model that is changed as it is read": type(source) not in (HFDirectory, GGUFFile),
        "--autotune": config.autotune,
    }
    for what, is_asked in others.items():
        if is_asked:
            raise UsageError(f"{asked}: {what} cannot be combined with several ranks yet; use one")
    if not hasattr(os, "memfd_create"):
        raise CapacityError(f"{asked}: ranks share memory in a way that this system does not have; use one")
    counts = [("layers", model.num_hidden_layers, stages), ("attention heads", model.num_attention_heads, size)]
    if model.moe is not None:
        counts.append(("experts", model.moe.count, size))
    if model.delta is not None:
        counts.append(("linear value heads", model.delta.heads, size))
    for what, count, needed in counts:
        if count < needed:
            raise UsageError(f"{asked}: {source.name} has {count} {what}, and each rank needs one of its own")
    divided = [("attention heads", model.num_attention_heads, "key heads", model.num_key_value_heads)]
    if model.delta is not None:
        divided.append(("linear value heads", model.delta.heads, "linear key heads", model.delta.key_heads))
    for name, heads, keys, kv_heads in divided:
        if on_gpus and (heads % size or (kv_heads % size and size % kv_heads)):
            raise UsageError(f"{asked}: {heads} {name} and {kv_heads} {keys} do not divide evenly among GPUs")


def option(config: EngineConfig) -> str:
    """What asks for several ranks, as the user wrote it."""
    sizes = {"tensor": config.tensor_parallel_size, "pipeline": config.pipeline_parallel_size}
    return " ".join(f"--{kind}-parallel-size {size}" for kind, size in sizes.items() if size > 1)


def rank_of_engine(config: EngineConfig) -> int:
    """The rank that plans and samples: the first one of the last stage."""
    return (config.pipeline_parallel_size - 1) * config.tensor_parallel_size


def require_executor(executor: Executor, config: EngineConfig) -> None:
    """Raises ``UsageError`` where ranks do not compute on this, ``CapacityError`` where there are too few GPUs."""
    if executor.name != "native" and (executor.name != "triton" or config.pipeline_parallel_size > 1):
        instead = "--tensor-parallel-size" if executor.name == "triton" else "--kernels native"
        raise UsageError(f"{option(config)} is not served by the {executor.name} kernels: choose {instead}")
    if executor.placement.device.type == "cuda" and (missing := process_group.missing(config.num_ranks)):
        raise CapacityError(f"{option(config)}: {missing}; choose fewer ranks, or --kernels native")


def exchange_of(executor: Executor, source: ModelSource, model: DecoderConfig, config: EngineConfig) -> Exchange:
    """How the shards of ``source`` get what others computed. Sums of terms take half the exchanges, but their last bits
    change with the batch, and the terms that a rank computes are those of whole groups of inputs."""
    if executor.name == "native" or config.tensor_parallel_size == 1:
        return "memory"
    spec, modules = source.spec, model.modules
    if executor.batch_invariant or (spec is not None and spec.act_order):
        return "all-gather"
    shards = Shard(0, config.tensor_parallel_size).all
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    ends = {
        modules.out: [shard.heads(heads, kv_heads)[0].stop * model.value_dim for shard in shards],
        modules.down: [shard.part(model.intermediate_size).stop for shard in shards],
    }
    if model.delta is not None:
        ends[modules.delta_out] = [model.delta.own(shard)[2][1].stop for shard in shards]
    if model.moe is not None:
        ends[modules.shared_down] = [shard.part(model.moe.shared).stop for shard in shards]
    for module in source.linears():
        scheme = spec.scheme_of(module) if spec is not None else None
        cuts = next((cuts for name, cuts in ends.items() if module.endswith(f".{name}")), [])
        if scheme is not None and not all(scheme.can_cut(cuts[-1], cut) for cut in cuts):
            return "all-gather"
    return "all-reduce"


def of_one_rank(config: EngineConfig) -> EngineConfig:
    """For a model that the engine's rank computes alone, with the cores that it has."""
    threads, cpus = threads_of(config, rank_of_engine(config))
    return replace(config, tensor_parallel_size=1, pipeline_parallel_size=1, threads=threads, cpu_list=cpus)


def threads_of(config: EngineConfig, rank: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(threads, CPUs to pin them to) of a rank: its share of the cores where nothing is said."""
    size, cpus = config.num_ranks, config.cpu_list
    if cpus is not None:
        each = len(cpus) // size
        return None, cpus[rank * each : (rank + 1) * each]
    if size == 1 or config.threads is not None:
        return config.threads, None
    return max(1, default_threads() // size), None
