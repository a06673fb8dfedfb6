"""``plan_together``: how several models, a process each, divide the memory and the threads of one machine.

It opens checkpoints and imports torch, so a router asks for it in a process that ends again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.source import ModelSource, open_model
from qserve.kernels.threads import default_threads
from qserve.runtime.backend_choice import backend_for
from qserve.runtime.config import EngineConfig
from qserve.runtime.fleet.model_share import ModelShare
from qserve.runtime.memory import MemoryPlan, divide


def plan_together(models: Sequence[str], names: Sequence[str], config: EngineConfig) -> list[ModelShare]:
    """``names``: what requests call the models, in their order; empty takes their own. ``config.kv_cache_memory`` is
    of each model; threads and CPUs are of all together.

    Raises ``QServeError`` where a model cannot be served, ``UsageError`` where two have one name, and
    ``CapacityError`` where they do not fit together.
    """
    sources = [open_model(model) for model in models]
    called = list(names) or [source.name for source in sources]
    if twice := [name for name in called if called.count(name) > 1]:
        raise UsageError(f"two models are called {twice[0]!r}: give --served-model-name for each, in their order")
    plans = {name: _plan(name, source, replace(config, kv_cache_memory=None)) for name, source in zip(called, sources)}
    caches = divide(plans, config.kv_cache_memory)
    for name, source in zip(called, sources):
        own = replace(config, kv_cache_memory=caches[name], gpu_memory_utilization=None)
        _plan(name, source, own)  # it may hold fewer tokens than it is asked to
    return [
        ModelShare(name, model, caches[name], threads, cpus)
        for name, model, (threads, cpus) in zip(called, models, _threads(config, len(models)))
    ]


def _plan(name: str, source: ModelSource, config: EngineConfig) -> MemoryPlan:
    try:
        return backend_for(source, config).plan(source, config)
    except CapacityError as error:
        raise CapacityError(f"{name}: {error}") from None


def _threads(config: EngineConfig, count: int) -> list[tuple[int, tuple[int, ...] | None]]:
    """Threads and CPUs of each of ``count`` models: equal parts, the first ones get what is left over."""
    total = config.num_threads or default_threads()
    parts, rest = divmod(total, count)
    sizes = [max(1, parts + (index < rest)) for index in range(count)]
    if config.cpu_list is None:
        return [(size, None) for size in sizes]
    if total < count:
        raise UsageError(f"--cpu-list names {total} CPUs for {count} models: each needs one at least")
    starts = [sum(sizes[:index]) for index in range(count)]
    return [(size, config.cpu_list[start : start + size]) for start, size in zip(starts, sizes)]
