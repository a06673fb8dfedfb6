"""``MemoryPlan``: how the memory of a serving process is divided, from shapes alone, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import psutil
import torch

from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.modules import Modules
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels.executor import Executor
from qserve.kernels.int8 import int8_scheme
from qserve.kernels.kv_cache import head_numel, stored_as
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.cache import CacheLayout, blocks_needed, tokens_held
from qserve.runtime.config import EngineConfig
from qserve.runtime.models.config import is_classifier

_SHARE = 0.5  # of the memory free after weights and workspace; the machine keeps the rest
GPU_SHARE = 0.9  # the same for a GPU of our own; the rest is for the driver and the kernels


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, and the KV blocks and context they allow.

    ``windows``: one for each group of layers (``CacheLayout``). ``process`` is resident before anything is loaded.
    ``states`` are what layers keep of ``--max-num-seqs`` sequences besides blocks, and the snapshots of that.
    ``kv_offload`` is for KV blocks that the cache evicts. ``files`` are those of the checkpoint; their pages stay in
    memory until another process needs it. ``share``: the part of the free memory that the KV cache may have.
    """

    weights: int
    workspace: int
    kv_cache: int
    available: int
    num_blocks: int
    max_model_len: int
    process: int = 0
    files: int = 0
    windows: tuple[int, ...] = (0,)
    kv_offload: int = 0
    states: int = 0
    share: float = _SHARE

    @property
    def peak(self) -> int:
        """Bytes resident when every KV block has been used."""
        cache = self.kv_cache + self.kv_offload + self.states
        return self.process + self.files + self.weights + self.workspace + cache

    def lines(self) -> list[str]:
        """The plan for a person."""
        return [
            f"memory: {_mib(self.weights)} weights + {_mib(self.workspace)} workspace + {_mib(self.kv_cache)} "
            f"KV cache of {_mib(self.available)} available"
            + (f", and {_mib(self.states)} for the states of sequences and their snapshots" if self.states else ""),
            f"KV cache: {self.num_blocks} blocks of {BLOCK_SIZE} tokens; context {self.max_model_len} tokens"
            + (f"; {_mib(self.kv_offload)} of memory for evicted blocks" if self.kv_offload else ""),
            f"peak: {_mib(self.peak)} resident, with {_mib(self.process)} of the process itself and "
            f"{_mib(self.files)} of files that the system drops when it needs room",
        ]


def weight_bytes(source: ModelSource, modules: Modules, executor: Executor, *, int8_head: bool) -> int:
    """Bytes of the weights as ``executor`` holds them."""
    return sum(held_bytes(source, modules, executor, int8_head=int8_head).values())


def layer_bytes(held: Mapping[str, int], modules: Modules, count: int) -> list[int]:
    """Of ``held_bytes`` those that a step reads, for each of ``count`` layers. The last has norm and head too. Of the
    embedding a step reads some rows alone, so that counts for nothing."""
    found, layers = [0] * count, f"{modules.layers}."
    looked_up = _looked_up(modules)
    for name, size in held.items():
        layer = int(name.removeprefix(layers).partition(".")[0]) if name.startswith(layers) else count - 1
        # Layers behind the last one predict several tokens at once, and are not served.
        if layer < count and not f"{name}.".startswith(looked_up):
            found[layer] += size
    return found


def lookup_bytes(held: Mapping[str, int], modules: Modules) -> int:
    """Of ``held_bytes`` those of the embeddings."""
    return sum(size for name, size in held.items() if f"{name}.".startswith(_looked_up(modules)))


def _looked_up(modules: Modules) -> tuple[str, ...]:
    return tuple(f"{name}." for name in (modules.embedding, modules.positions) if name)


def held_bytes(source: ModelSource, modules: Modules, executor: Executor, *, int8_head: bool) -> dict[str, int]:
    """Bytes of each weight as ``executor`` holds it, by the name of the tensor, or of the linear that is packed. What
    is laid out for the product of the head has the head's name."""
    packed, embedding, output = set(source.linears()), modules.embedding, modules.head

    def product(module: str) -> int:
        assert source.spec is not None
        if module.endswith(f".{modules.kv_b}"):  # latent attention takes it apart
            return 4 * prod(source.shape(module)[:2])
        return executor.packed_bytes(
            _scheme(source, module), source.spec.activations_of(module), *source.shape(module)[:2]
        )

    def dense(name: str) -> int:
        shape, dtype = source.shape(name), executor.placement.dense
        return source.nbytes(name) if dtype is None or len(shape) < 2 else prod(shape) * dtype.itemsize

    looked_up = f"{embedding}.weight"  # rows that are looked up keep their form
    held = {name: dense(name) for name in source.names() if name not in (f"{output}.weight", looked_up)}
    held |= {module: product(module) for module in packed - {embedding}}
    if source.has(looked_up):
        held[looked_up] = source.nbytes(looked_up)
    if embedding in packed:  # one byte for every code
        scheme, (vocab, width) = _scheme(source, embedding), source.shape(embedding)
        held[embedding] = vocab * width + vocab * scheme.groups(width) * (4 if scheme.symmetric else 5)
    if output in packed or is_classifier(source.config):
        return held
    if embedding in packed and not source.has(f"{output}.weight"):
        return held | {output: product(embedding)}
    # A tied head is laid out a second time, for the product.
    head = f"{output}.weight" if source.has(f"{output}.weight") else looked_up
    if not int8_head:
        return held | {output: dense(head)}
    vocab, width = source.shape(head)
    return held | {output: executor.packed_bytes(int8_scheme(width), None, vocab, width)}


def _scheme(source: ModelSource, module: str) -> WeightScheme:
    assert source.spec is not None
    return source.spec.scheme_of(module) or source.spec.weights


def block_bytes_of(layout: CacheLayout, kv_dtype: torch.dtype) -> int:
    """Bytes of a KV block: what all places keep of its tokens."""
    spec = layout.groups[0].spec
    heads = (1 if spec.latent else 2) * spec.kv_heads
    return layout.places * heads * head_numel(kv_dtype, spec.head_dim) * stored_as(kv_dtype).itemsize


def plan_memory(
    layout: CacheLayout,
    *,
    weights: int,
    workspace: int,
    kv_dtype: torch.dtype,
    context: int,
    config: EngineConfig,
    files: int = 0,
    device: torch.device | None = None,
    block_bytes: int | None = None,
    state_bytes: int | None = None,
) -> MemoryPlan:
    """Divide the free memory as ``config`` wishes. ``context`` is the model's own limit. On a GPU the memory is that of
    ``device``. ``block_bytes`` and ``state_bytes``: of a block, and of what is kept of a sequence besides, in all
    processes together, where there are several.

    Raises ``CapacityError`` with the arithmetic where the wishes, or the model, do not fit.
    """
    max_model_len, kv_cache_memory = config.max_model_len, config.kv_cache_memory
    kv_offload_memory = config.offload_memory
    on_gpu = device is not None and device.type == "cuda"
    available, total = torch.cuda.mem_get_info(device) if on_gpu else (available_memory(), total_memory())
    share = GPU_SHARE if on_gpu else _SHARE
    if config.gpu_memory_utilization is not None:
        available, share = max(0, available - reserved(total, config.gpu_memory_utilization)), 1.0
    block_bytes, windows = block_bytes or block_bytes_of(layout, kv_dtype), layout.windows
    states = config.num_state_slots * (layout.state_bytes if state_bytes is None else state_bytes)
    if max_model_len is not None and max_model_len > context:
        raise CapacityError(f"--max-model-len {max_model_len} exceeds the model's context of {context} tokens")
    host = available_memory() if on_gpu else available - weights - workspace
    if kv_offload_memory and kv_offload_memory + (0 if on_gpu else block_bytes) > host:
        raise CapacityError(f"--kv-offload-memory {_mib(kv_offload_memory)} exceeds the {_mib(max(host, 0))} of memory "
                            "that is left; lower it")
    free = available - weights - workspace - states - (0 if on_gpu else kv_offload_memory)
    if free < block_bytes:
        raise CapacityError(
            f"the model does not fit: {_mib(weights)} weights + {_mib(workspace)} workspace + {_mib(block_bytes)} for "
            f"one KV block exceed the {_mib(available)} of memory available"
            + (f", with {_mib(states)} for states of --max-num-seqs {config.max_num_seqs}: lower it" if states else "")
        )
    wanted = config.max_num_seqs * blocks_needed(max_model_len or context, BLOCK_SIZE, windows)
    if kv_cache_memory is None:
        num_blocks = min(wanted, int(free * share) // block_bytes)
    else:
        if kv_cache_memory > free:
            raise CapacityError(
                f"--kv-cache-memory {_mib(kv_cache_memory)} exceeds the {_mib(free)} left of {_mib(available)} after "
                f"{_mib(weights)} weights and {_mib(workspace)} workspace"
            )
        num_blocks = kv_cache_memory // block_bytes
    needed = blocks_needed(max_model_len or 1, BLOCK_SIZE, windows)
    if num_blocks < needed:
        raise CapacityError(
            f"a KV cache of {num_blocks} blocks of {BLOCK_SIZE} tokens ({_mib(block_bytes)} each) cannot hold "
            f"{max_model_len or 1} tokens, which need {needed}: raise --kv-cache-memory to "
            f"{_mib(needed * block_bytes)} or lower --max-model-len"
        )
    return MemoryPlan(
        weights=weights,
        workspace=workspace,
        kv_cache=num_blocks * block_bytes,
        available=available,
        num_blocks=num_blocks,
        max_model_len=max_model_len or tokens_held(num_blocks, BLOCK_SIZE, windows, context),
        windows=windows,
        kv_offload=kv_offload_memory,
        states=states,
        share=share,
        process=int(psutil.Process().memory_info().rss),
        files=files,
    )


def divide(plans: Mapping[str, MemoryPlan], kv_cache_memory: int | None = None) -> dict[str, int]:
    """Bytes of the KV cache for each of several models that share one memory, a process each. ``plans``: as each would
    be served alone. ``kv_cache_memory``: the size of each cache; None divides what all weights leave free, equally.

    Raises ``CapacityError`` with the arithmetic where they do not fit together.
    """
    available = min(plan.available for plan in plans.values())
    needed = {
        name: plan.process + plan.weights + plan.workspace + plan.kv_offload + plan.states
        for name, plan in plans.items()
    }
    left = available - sum(needed.values())
    if left < (kv_cache_memory or 1) * len(plans):
        sizes = " + ".join(f"{_mib(size)} for {name}" for name, size in needed.items())
        caches = f" + {len(plans)} KV caches of {_mib(kv_cache_memory)}" if kv_cache_memory else ""
        raise CapacityError(
            f"the models do not fit together: {sizes} (weights, workspace and process){caches} exceed the "
            f"{_mib(available)} of memory available; serve fewer, or smaller ones"
            + (", or lower --kv-cache-memory" if kv_cache_memory else "")
        )
    return {
        name: kv_cache_memory or min(plan.kv_cache, int(left * plan.share) // len(plans))
        for name, plan in plans.items()
    }


def file_bytes(source: ModelSource) -> int:
    """Bytes of the weights' files that are mapped into memory. What is read of a GGUF file is copied."""
    return sum(file.stat().st_size for file in source.path.glob("*.safetensors"))


def reserved(total: int, utilization: float) -> int:
    """Bytes of ``total`` that a ``gpu_memory_utilization`` leaves to others."""
    return total - int(total * utilization)


def measured(
    plan: MemoryPlan, free: int, block_bytes: int, wanted: int, needed: int, share: float = GPU_SHARE
) -> MemoryPlan:
    """``plan`` with the KV cache that fits into ``share`` of the ``free`` bytes that a GPU has left after its largest
    steps. It has at most ``wanted`` blocks; raises ``CapacityError`` where it would have fewer than ``needed``."""
    num_blocks = min(wanted, int(free * share) // block_bytes)
    if num_blocks < needed:
        raise CapacityError(
            f"after the largest step {_mib(free)} are left of {_mib(plan.available)}: {num_blocks} KV blocks of "
            f"{_mib(block_bytes)}, and {needed} are needed; lower --max-model-len or --max-num-batched-tokens"
        )
    length = tokens_held(num_blocks, BLOCK_SIZE, plan.windows, plan.max_model_len)
    return replace(plan, num_blocks=num_blocks, kv_cache=num_blocks * block_bytes, max_model_len=length)


def available_memory() -> int:
    """Bytes free for this process: of the machine, or of its control group where that is less."""
    free = int(psutil.virtual_memory().available)
    limit, used = _group("memory.max"), _group("memory.current")
    return free if limit is None or used is None else min(free, limit - used)


def total_memory() -> int:
    """Bytes of the machine's memory, or the limit of the control group where that is less."""
    total = int(psutil.virtual_memory().total)
    limit = _group("memory.max")
    return total if limit is None else min(total, limit)


def _group(name: str) -> int | None:
    """A number of this process's control group; None where there is no group, or no limit."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):  # "max"
        return None


def _mib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:.1f} MiB"
