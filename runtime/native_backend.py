"""``NativeBackend``: from a checkpoint to a native decoder. Memory is divided before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from socket import socket

import torch
from torch import Tensor

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.unpacked import Unpacked, is_in
from qserve.kernels import native, process_group, registry
from qserve.kernels.executor import Executor
from qserve.kernels.ops import BLOCK_SIZE, PACKED_KV, SCALED_KV
from qserve.runtime import heap, warmup
from qserve.runtime.backend import CacheDescription, Limits, LoadedModel
from qserve.runtime.cache import blocks_needed
from qserve.runtime.classifier import read_classifier
from qserve.runtime.config import EngineConfig
from qserve.runtime.gpu_memory import GpuMemory
from qserve.runtime.memory import (
    GPU_SHARE,
    MemoryPlan,
    block_bytes_of,
    file_bytes,
    held_bytes,
    layer_bytes,
    lookup_bytes,
    measured,
    plan_memory,
    reserved,
)
from qserve.runtime.models.config import DecoderConfig, decoder_config, is_classifier
from qserve.runtime.models.decoder import Decoder, DecoderLimits, cache_layout, missing_kernels
from qserve.runtime.models.kv_scales import cache_dtype, require_packed_heads
from qserve.runtime.models.lora_layers import LoraLayers
from qserve.runtime.models.rope import context_limit
from qserve.runtime.parallel import support
from qserve.runtime.parallel.first_rank import FirstRank
from qserve.runtime.parallel.group import RankGroup, SharedMemory
from qserve.runtime.parallel.pipeline_runner import PipelineRunner
from qserve.runtime.parallel.rank_adapters import RankAdapters
from qserve.runtime.parallel.rank_processes import RankProcesses, RankTask
from qserve.runtime.parallel.ranks_runner import RanksRunner, share_slots
from qserve.runtime.parallel.runner import ParallelRunner
from qserve.runtime.parallel.shard import Shard
from qserve.runtime.parallel.stage import Stage, divide
from qserve.runtime.parallel.stage_channel import StageChannel
from qserve.runtime.parallel.step_channel import StepChannel
from qserve.runtime.runner import DecoderRunner


class NativeBackend:
    """Serves the families of the native decoder, on the kernels that ``EngineConfig`` asks for."""

    def load(
        self,
        source: ModelSource,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        planned: Callable[[MemoryPlan], None] | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> LoadedModel:
        """``progress`` counts layers, and then, if products are timed, the timed products. On a GPU the KV cache gets
        what is left after the largest steps that may come; ``planned`` gets what is expected."""
        source, model_config, executor = _prepare(source, config)
        if config.autotune:
            registry.require_autotune(executor)
        adapters: LoraLayers | RankAdapters | None
        sizes = _limits(config, executor, hidden_layers)
        runner: DecoderRunner
        if config.num_ranks > 1:
            runner, memory, notes, adapters = _load_ranks(source, model_config, config, executor, sizes, progress)
        else:
            decoder, memory, notes = _load(source, model_config, config, executor, sizes, progress, planned)
            runner, adapters = DecoderRunner(decoder), decoder.lora
        if isinstance(source, Unpacked):
            held = str(source.dtype()).removeprefix("torch.")
            stored = source.stored_in
            notes.insert(0, f"weights in {stored} are held in {held}: no kernel multiplies them as they are stored")
        limits = Limits(
            vocab_size=model_config.vocab_size,
            hidden_size=model_config.hidden_size,
            max_model_len=memory.max_model_len,
            max_num_batched_tokens=runner.decoder.limits.max_tokens,
            max_num_logits=runner.decoder.limits.max_logits,
        )
        return LoadedModel(
            runner,
            CacheDescription(memory.num_blocks, BLOCK_SIZE, memory.windows, bool(memory.states)),
            limits,
            memory,
            executor.name,
            executor.asynchronous,
            read_classifier(source, model_config, config.reranker),
            not is_classifier(source.config),
            tuple(notes),
            GpuMemory(executor.placement.device) if executor.placement.device.type == "cuda" else None,
            adapters,
            runner.processes if isinstance(runner, RanksRunner) else None,
            runner if isinstance(runner, PipelineRunner) else None,
        )

    def plan(self, source: ModelSource, config: EngineConfig) -> MemoryPlan:
        source, model_config, executor = _prepare(source, config)
        return _plan(source, model_config, config, executor, _limits(config, executor))


def _prepare(source: ModelSource, config: EngineConfig) -> tuple[ModelSource, DecoderConfig, Executor]:
    """The checkpoint as it is held, what it is, and what computes it."""
    require_stored_as(source, config.quantization)
    executor = _executor(source, config, support.rank_of_engine(config))
    source = _held(source, executor)
    model_config = decoder_config(source.config, source.name)
    kv_dtype = cache_dtype(config.kv_cache_dtype, source)
    if model_config.latent is not None and kv_dtype in (*SCALED_KV, PACKED_KV):
        raise UsageError(f"{source.name} caches latent vectors, which are kept in 16 or 32 bits: choose "
                         "--kv-cache-dtype fp16, bf16 or fp32")
    if kv_dtype == PACKED_KV:
        require_packed_heads(model_config.head_dim, source.name)
    if config.num_ranks > 1:
        support.require_served(source, model_config, config, executor)
    if model_config.delta is not None:
        _require_no_return(model_config, config)
    computes = str(executor.placement.activations).removeprefix("torch.")
    if config.dtype not in ("auto", computes):
        raise CapacityError(f"--dtype {config.dtype}: the {executor.name} kernels compute in {computes} here; "
                            "leave it out, or choose auto")
    return source, model_config, executor


def _held(source: ModelSource, executor: Executor) -> ModelSource:
    """``source`` as ``executor`` holds it: packed where it has kernels for that."""
    source = source.packed() if isinstance(source, GGUFFile) else source
    return Unpacked(source) if is_in(source, *executor.placement.unpacked) else source


def _require_no_return(model: DecoderConfig, config: EngineConfig) -> None:
    """Raises ``UsageError`` for what goes back to an earlier token of a sequence: no layer keeps its state there."""
    asked = {"speculative decoding": config.speculative_config is not None,
             "--kv-offload-memory and --kv-offload-dir": bool(config.offload_memory)}
    for what, is_asked in asked.items():
        if is_asked:
            raise UsageError(f"{what}: this goes back to earlier tokens, of which {model.model_type} keeps no state; "
                             "leave it out")


def _limits(config: EngineConfig, executor: Executor, hidden_layers: tuple[int, ...] = ()) -> DecoderLimits:
    """Those of a step; memory sets the others."""
    on_gpu = executor.placement.device.type == "cuda"
    return DecoderLimits(config.step_tokens(on_gpu), config.logit_rows, 0, 0, config.num_state_slots, hidden_layers)


def _has_int8_head(source: ModelSource, config: EngineConfig) -> bool:
    return source.spec is not None and config.head != "dense"


def _plan(
    source: ModelSource, model_config: DecoderConfig, config: EngineConfig, executor: Executor, limits: DecoderLimits
) -> MemoryPlan:
    """The division of memory of all ranks together; of one GPU, where each rank has its own."""
    exchange = support.exchange_of(executor, source, model_config, config)
    parts = _parts(source, model_config, config, executor)
    groups = [RankGroup(shard, stage=stage, exchange=exchange) for shard, stage in parts]
    held = held_bytes(source, model_config.modules, executor, int8_head=_has_int8_head(source, config))
    weights = sum(held.values())
    if exchange != "memory":  # each looks up whole embeddings
        weights += lookup_bytes(held, model_config.modules) * (len(groups) - 1)
    device, kv_dtype = executor.placement.device, cache_dtype(config.kv_cache_dtype, source)
    workspaces = [limits.workspace_bytes(model_config, executor.placement.activations, group) for group in groups]
    layouts = [cache_layout(model_config, group) for group in groups]
    blocks = [block_bytes_of(layout, kv_dtype) for layout in layouts]
    states = [layout.state_bytes for layout in layouts]
    shared = sum(group.shared_bytes for group in groups if not group.is_first)
    workspace, block_bytes = sum(workspaces) - shared, sum(blocks)
    workspace += StageChannel.hidden_bytes(config.pipeline_parallel_size, limits, model_config.hidden_size)
    if device.type == "cuda":
        weights, workspace, block_bytes = -(-weights // len(groups)), max(workspaces), max(blocks)
    memory = plan_memory(
        model_config.cache_layout,
        weights=weights,
        workspace=workspace,
        kv_dtype=kv_dtype,
        context=context_limit(model_config),
        config=config,
        files=file_bytes(source),
        device=device,
        block_bytes=block_bytes,
        state_bytes=max(states) if device.type == "cuda" else sum(states),
    )
    return replace(memory, process=memory.process * len(parts))


def _parts(
    source: ModelSource, model_config: DecoderConfig, config: EngineConfig, executor: Executor
) -> list[tuple[Shard, Stage]]:
    """What each rank has of the model. Stages divide evenly what a step reads: the bytes of layers and head."""
    stages = [Stage()]
    if config.pipeline_parallel_size > 1:
        modules, count = model_config.modules, model_config.num_hidden_layers
        held = held_bytes(source, modules, executor, int8_head=_has_int8_head(source, config))
        stages = divide(layer_bytes(held, modules, count), config.pipeline_parallel_size)
    return [(shard, stage) for stage in stages for shard in Shard(0, config.tensor_parallel_size).all]


@dataclass(frozen=True)
class LoadedRank:
    """One of several ranks. ``model``: ``decoder``, or that of all ranks of its stage. ``channel``: how it is told what
    to run. ``slots``: see ``share_slots``."""

    decoder: Decoder
    model: Decoder | FirstRank
    channel: StepChannel | StageChannel
    slots: Tensor

    def follow(self) -> None:
        """Run what it is told to, until another rank ends: then ``RankLost`` is raised."""
        if isinstance(self.channel, StageChannel):
            self.channel.follow(self.model)
        else:
            self.channel.follow(self.decoder)


def load_rank(
    source: ModelSource,
    config: EngineConfig,
    limits: DecoderLimits,
    group: RankGroup,
    block_bytes: Sequence[int],
    at: socket | int | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedRank:
    """``block_bytes``: of a KV block on each rank. ``at``: as ``process_group.join`` takes it; None where ranks share
    memory."""
    assert group.memory is not None and group.everyone is not None
    executor = executor or _executor(source, config, group.number)
    if at is not None:
        native.meeting(group.ranks)()  # here a rank that has ended is noticed, and there it is waited for
        process_group.join(group.ranks, executor.placement.device, at)
    decoder = _decoder(_held(source, executor), config, executor, limits, progress, group=group)
    count, groups = config.offload_memory // sum(block_bytes), len(decoder.layout.groups)
    slots = share_slots(group.everyone, decoder, block_bytes, group.number, count)
    shards = StepChannel(group.memory, group, limits, groups) if group.shard.size > 1 else None
    model = FirstRank(decoder, shards) if shards is not None and group.is_first else decoder
    if shards is not None and (group.stage.size == 1 or not group.is_first):
        return LoadedRank(decoder, model, shards, slots)
    adapters = 0 if decoder.lora is None else decoder.lora.count
    stages = StageChannel(group.everyone, group, limits, groups, decoder.config.hidden_size, adapters, shards)
    return LoadedRank(decoder, model, stages, slots)


def _executor(source: ModelSource, config: EngineConfig, rank: int) -> Executor:
    threads, cpus = support.threads_of(config, rank)
    dtype, gpu = activation_dtype(source, config.dtype), rank if config.tensor_parallel_size > 1 else None
    executor = registry.make(config.kernels, threads, dtype, cpus, gpu)
    if config.num_ranks > 1:
        support.require_executor(executor, config)
    return executor


def _decoder(
    source: ModelSource,
    config: EngineConfig,
    executor: Executor,
    limits: DecoderLimits,
    progress: Callable[[int, int], None] | None,
    *,
    group: RankGroup | None = None,
) -> Decoder:
    def loaded(done: int, total: int) -> None:
        # Now, not at the end: else the peak includes what every layer in floats, or unpacked from blocks, left behind.
        if source.spec is None or isinstance(source, GGUFFile):
            heap.release()
        if progress is not None:
            progress(done, total)

    # Twice: of those that are replaced, some still end their requests.
    lora = LoraLayers(2 * config.max_loras, config.max_lora_rank) if config.enable_lora else None
    model_config, kv_dtype = decoder_config(source.config, source.name), cache_dtype(config.kv_cache_dtype, source)
    decoder = Decoder(
        source,
        model_config,
        executor,
        limits,
        kv_dtype=kv_dtype,
        int8_head=_has_int8_head(source, config),
        lora=lora,
        group=group,
        progress=loaded,
    )
    if lora is not None and group is not None and group.stage.size > 1:
        whole = LoraLayers(0, config.max_lora_rank)
        missing_kernels(source, model_config, executor, kv_dtype, whole)
        lora.shapes = whole.shapes  # an adapter is that of all stages
    heap.release()
    return decoder


def _load_ranks(
    source: ModelSource,
    model_config: DecoderConfig,
    config: EngineConfig,
    executor: Executor,
    limits: DecoderLimits,
    progress: Callable[[int, int], None] | None,
) -> tuple[ParallelRunner | PipelineRunner, MemoryPlan, list[str], RankAdapters | None]:
    """The rank that plans and samples, with the others beside it, and the adapters of all."""
    memory = _plan(source, model_config, config, executor, limits)
    limits = _with_cache(limits, memory, executor)
    parts = _parts(source, model_config, config, executor)
    shard, stage = parts[support.rank_of_engine(config)]
    everyone, *of_stages = (SharedMemory() for _ in range(1 + config.pipeline_parallel_size))
    exchange = support.exchange_of(executor, source, model_config, config)
    group = RankGroup(shard, of_stages[stage.rank], stage, exchange, everyone)
    in_floats = isinstance(source, GGUFFile) and source.in_floats
    at = process_group.listen() if exchange != "memory" else None
    port = None if at is None else at.getsockname()[1]
    kv_dtype = cache_dtype(config.kv_cache_dtype, source)
    layouts = [cache_layout(model_config, RankGroup(part[0], stage=part[1])) for part in parts]
    blocks = tuple(block_bytes_of(layout, kv_dtype) for layout in layouts)
    path = str(source.path)
    tasks = [
        RankTask(path, in_floats, config, limits, memory, blocks, exchange, port, *part)
        for part in parts
        if part != (shard, stage)
    ]
    processes = RankProcesses(tasks, everyone.fd, [each.fd for each in of_stages], group.give_up, group.leave)
    try:
        with processes.explained():
            rank = load_rank(source, config, limits, group, blocks, at, executor, progress)
            memory, notes = settle(rank.decoder, memory, config, progress, group)
        runner = (
            PipelineRunner(rank.model, rank.channel, processes, rank.slots)
            if isinstance(rank.channel, StageChannel)
            else ParallelRunner(rank.model, rank.channel, processes, rank.slots)
        )
        runner.wait()
    except BaseException:
        processes.stop()
        raise
    finally:
        for each in (everyone, *of_stages):
            each.close()
        if at is not None:
            at.close()
    threads, cpus = support.threads_of(config, 0)
    kinds = []
    if config.pipeline_parallel_size > 1:
        counts = [len(stage.layers(model_config.num_hidden_layers)) for shard, stage in parts if shard.rank == 0]
        kinds.append(f"pipeline parallel: stages of {', '.join(map(str, counts))} layers")
    if config.tensor_parallel_size > 1:
        kinds.append(f"tensor parallel: {config.tensor_parallel_size} ranks")
    note = ", each ".join(kinds)
    if exchange == "memory":
        note += f", with {len(cpus) if cpus else threads} threads each"
    else:
        note += f", by {exchange} ({process_group.backend(executor.placement.device)})"
    adapters = None
    if rank.decoder.lora is not None:
        adapters = RankAdapters(
            rank.decoder.lora,
            processes.ask,
            rank.channel.change_adapter,
            changes_own=isinstance(rank.channel, StageChannel),
            sharing=1 if executor.placement.device.type == "cuda" else config.num_ranks,
        )
    return runner, memory, [note, *_notes(source, rank.decoder), *notes], adapters


def _notes(source: ModelSource, decoder: Decoder) -> list[str]:
    notes = [f"without a kernel, computed by the torch reference: {what}" for what in decoder.fallbacks]
    if source.part_of is not None:
        notes.insert(0, f"the text part of {source.part_of}: images and sound are not served")
    return notes


def _load(
    source: ModelSource,
    model_config: DecoderConfig,
    config: EngineConfig,
    executor: Executor,
    limits: DecoderLimits,
    progress: Callable[[int, int], None] | None,
    planned: Callable[[MemoryPlan], None] | None,
) -> tuple[Decoder, MemoryPlan, list[str]]:
    """The decoder, the division of its memory, and notes on how it is computed."""
    memory = _plan(source, model_config, config, executor, limits)
    if planned and executor.placement.device.type == "cuda":
        planned(memory)
    decoder = _decoder(source, config, executor, _with_cache(limits, memory, executor), progress)
    memory, notes = settle(decoder, memory, config, progress)
    return decoder, memory, [*_notes(source, decoder), *notes]


def _with_cache(limits: DecoderLimits, memory: MemoryPlan, executor: Executor) -> DecoderLimits:
    """``limits`` of a decoder as it is loaded: on a GPU its cache grows afterwards."""
    limits = replace(limits, max_positions=memory.max_model_len, num_blocks=memory.num_blocks)
    if executor.placement.device.type == "cuda":
        return replace(limits, num_blocks=warmup.blocks(limits))
    return limits


def settle(
    decoder: Decoder,
    memory: MemoryPlan,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    group: RankGroup | None = None,
) -> tuple[MemoryPlan, list[str]]:
    """Make a loaded decoder ready, with its cache at its final size. Returns ``memory`` as it turned out, and notes.
    All ranks of ``group`` do it together."""
    executor = decoder.executor
    notes = registry.settle(executor, config.autotune, progress)  # this takes memory that the cache must leave free
    if executor.placement.device.type == "cuda":
        warm, gpu = executor.warm_sizes, GpuMemory(executor.placement.device)
        registry.compile_kernels(executor, lambda: warmup.run(decoder, memory.num_blocks, warm))
        memory = grow_cache(decoder, memory, config, warm, gpu, group)
    return memory, notes


def grow_cache(
    decoder: Decoder,
    memory: MemoryPlan,
    config: EngineConfig,
    sizes: Sequence[int],
    gpu: GpuMemory,
    group: RankGroup | None = None,
) -> MemoryPlan:
    """Give the KV cache what the largest steps leave of ``gpu``, and make steps of all ``sizes`` ready. The ranks of
    ``group`` have as many blocks as the one with the least memory has room for."""
    passing = gpu.passing(lambda: warmup.run(decoder, memory.num_blocks, sizes))
    free, share = gpu.free() - passing + decoder.kv.nbytes, GPU_SHARE
    if config.gpu_memory_utilization is not None:
        free, share = free - reserved(gpu.total(), config.gpu_memory_utilization), 1.0
    memory = measured(
        memory,
        free if group is None else group.least(free, decoder.kv.device),
        decoder.kv.nbytes // decoder.kv.shape[2],
        memory.num_blocks if config.kv_cache_memory is not None else _wanted(config, memory),
        blocks_needed(config.max_model_len or 1, BLOCK_SIZE, memory.windows),
        share,
    )
    decoder.resize_cache(memory.num_blocks)
    warmup.decode(decoder, memory.num_blocks, sizes)  # again: graphs remember where the cache was
    return memory


def _wanted(config: EngineConfig, memory: MemoryPlan) -> int:
    """Blocks that all requests at once can fill."""
    return config.max_num_seqs * blocks_needed(memory.max_model_len, BLOCK_SIZE, memory.windows)


def activation_dtype(source: ModelSource, asked: str = "auto") -> torch.dtype:
    """The dtype in which a GPU computes: ``asked`` of the 16-bit ones, else float16 for a model that was made for it,
    else bfloat16."""
    if asked in ("float16", "bfloat16"):
        return torch.float16 if asked == "float16" else torch.bfloat16
    return torch.float16 if source.dtype() == torch.float16 else torch.bfloat16


def require_stored_as(source: ModelSource, format: str | None) -> None:
    """Raises ``UsageError`` where ``format`` is given and the weights are stored in another one. vLLM's names of the
    kernels for a format, such as gptq_marlin, stand for the format."""
    stored = "gguf" if isinstance(source, GGUFFile) else source.format.name if source.format else None
    if format is not None and format.removesuffix("_marlin") not in (stored, (stored or "").removesuffix("_v2")):
        what = "not quantized" if stored is None else f"stored as {stored}"
        raise UsageError(f"--quantization {format}: {source.name} is {what}; qserve quantize writes quantized "
                         "checkpoints, and what is stored is read without this option")
