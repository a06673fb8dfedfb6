"""``TransformersBackend``: serves the model types that have no native decoder, through transformers' own modules.

It is slower than the native decoder: modules call torch for everything but products and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.checkpoint.source import ModelSource
from qserve.kernels import native, registry
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import BLOCK_SIZE, PACKED_KV, SCALED_KV
from qserve.kernels.threads import torch_threads
from qserve.runtime import heap
from qserve.runtime.backend import CacheDescription, Limits, LoadedModel
from qserve.runtime.config import EngineConfig
from qserve.runtime.fallback.model import TransformersModel
from qserve.runtime.fallback.outline import Outline
from qserve.runtime.fallback.parameters import Parameters
from qserve.runtime.fallback.skeleton import configuration
from qserve.runtime.fallback.unsupported import Unsupported
from qserve.runtime.memory import MemoryPlan, file_bytes, plan_memory
from qserve.runtime.models.config import is_classifier
from qserve.runtime.models.decoder import DecoderLimits
from qserve.runtime.models.kv_scales import cache_dtype
from qserve.runtime.native_backend import require_stored_as
from qserve.runtime.runner import DecoderRunner

_PROMPT = 24
"""Tokens for which the logits are compared."""
_AGREES = 0.02
"""How far the logits may be from transformers', as a share of their size: a KV cache in float16 costs 0.001. Weights
whose products round their inputs may cost more."""
_AGREES_ROUNDED = 0.2


class TransformersBackend:
    """Computes on the CPU. ``why``: the reason for which it serves a model, for people."""

    def __init__(self, why: str = "it was asked for") -> None:
        self._why = why

    def load(
        self,
        source: ModelSource,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        planned: Callable[[MemoryPlan], None] | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> LoadedModel:
        """``progress`` counts weights. Before anything is served, the logits of a prompt are compared with those of
        plain transformers, which reads the weights once more, one at a time."""
        _check(source, config)
        if hidden_layers:
            raise UsageError(f"{source.name} is computed through transformers, which gives out no hidden states for an "
                             "EAGLE-3 head; choose another method of --speculative-config")
        executor, kv_dtype = _executor(config), _cache_dtype(config, source)
        try:
            outline = _outline(source)
            model, memory = _load(source, outline, config, executor, kv_dtype, progress)
            heap.release()
            difference = disagreement(model)
        except Unsupported as error:
            raise _refusal(source, error) from None
        if difference > (_AGREES_ROUNDED if source.spec is not None else _AGREES):
            raise CheckpointError(
                f"{source.name} is not served through transformers: its logits differ from those of plain transformers "
                f"by {difference:.1%} of their size"
            )
        heap.release()
        return LoadedModel(
            DecoderRunner(model),
            CacheDescription(memory.num_blocks, BLOCK_SIZE, memory.windows),
            Limits(
                vocab_size=outline.found.vocab_size,
                hidden_size=outline.found.hidden_size,
                max_model_len=memory.max_model_len,
                max_num_batched_tokens=model.limits.max_tokens,
                max_num_logits=model.limits.max_logits,
            ),
            memory,
            f"transformers, {executor.name}",
            notes=tuple(_notes(self._why, model, outline, difference)),
        )

    def plan(self, source: ModelSource, config: EngineConfig) -> MemoryPlan:
        _check(source, config)
        try:
            return _plan(source, _outline(source), config, _executor(config), _cache_dtype(config, source))
        except Unsupported as error:
            raise _refusal(source, error) from None


def _check(source: ModelSource, config: EngineConfig) -> None:
    require_stored_as(source, config.quantization)
    if config.enable_lora:
        raise UsageError(f"{source.name} is computed through transformers, where adapters are not served; merge "
                         "the adapter with qserve quantize --lora")


def _refusal(source: ModelSource, error: Unsupported) -> CheckpointError:
    return CheckpointError(f"{source.name} is not served through transformers: it has {error.reason}")


def _limits(config: EngineConfig) -> DecoderLimits:
    """Those of a step; memory sets the others."""
    return DecoderLimits(config.step_tokens(False), config.logit_rows, 0, 0)


def _plan(
    source: ModelSource, outline: Outline, config: EngineConfig, executor: Executor, kv_dtype: torch.dtype
) -> MemoryPlan:
    limits = _limits(config)
    return plan_memory(
        outline.layout,
        weights=outline.weight_bytes(Parameters(outline.model, source), executor),
        workspace=outline.workspace_bytes(limits.max_tokens, limits.max_logits),
        kv_dtype=kv_dtype,
        context=outline.context(),
        config=config,
        files=file_bytes(source),
    )


def _executor(config: EngineConfig) -> Executor:
    if config.kernels.startswith("triton"):
        raise CapacityError(f"--kernels {config.kernels}: models without a native decoder are computed on the CPU")
    name = config.kernels
    if name == "auto":
        name = "native" if native.missing() is None else "reference"
    if config.dtype not in ("auto", "float32"):
        raise CapacityError(f"--dtype {config.dtype}: models without a native decoder are computed in float32")
    executor = registry.make(name, config.threads, cpus=config.cpu_list)
    if config.autotune:
        registry.require_autotune(executor)
    return executor


def _cache_dtype(config: EngineConfig, source: ModelSource) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return torch.float16
    dtype = cache_dtype(config.kv_cache_dtype, source)
    if dtype in (*SCALED_KV, PACKED_KV):
        raise UsageError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: models without a native decoder keep fp16, bf16 or fp32"
        )
    return dtype


def _outline(source: ModelSource) -> Outline:
    if is_classifier(source.config):
        raise Unsupported("a classification head")
    hf = configuration(source.config, source.name)
    try:
        return Outline(hf)
    except CheckpointError:
        raise
    except Exception as error:  # of transformers, for a configuration that its own classes do not take
        raise CheckpointError(f"{source.name}: transformers cannot build it: {type(error).__name__}: {error}") from None


def _load(
    source: ModelSource,
    outline: Outline,
    config: EngineConfig,
    executor: Executor,
    kv_dtype: torch.dtype,
    progress: Callable[[int, int], None] | None,
) -> tuple[TransformersModel, MemoryPlan]:
    memory = _plan(source, outline, config, executor, kv_dtype)
    limits = replace(_limits(config), max_positions=memory.max_model_len, num_blocks=memory.num_blocks)
    return TransformersModel(source, outline, executor, limits, kv_dtype=kv_dtype, progress=progress), memory


def disagreement(model: TransformersModel) -> float:
    """How far the logits of a fixed prompt, computed in two chunks, are from those of plain transformers: the norm of
    the difference over that of the logits, which are taken without their mean."""
    limits = model.limits
    groups = len(model.layout.groups)
    count = min(_PROMPT, limits.max_positions, limits.max_tokens, limits.num_blocks // groups * BLOCK_SIZE)
    ids = torch.arange(count) * 7919 % (model.logits.shape[1] - 3) + 3
    tables = torch.arange(groups * -(-count // BLOCK_SIZE), dtype=torch.int32).view(groups, 1, -1)
    rows, done = [], 0
    with torch_threads(1):
        for chunk in ids.split(-(-count // 2)):
            positions = torch.arange(done, done + len(chunk), dtype=torch.int32)
            blocks, offsets = positions.long() // BLOCK_SIZE, positions % BLOCK_SIZE
            start = torch.tensor([0, len(chunk)], dtype=torch.int32)
            steps = [
                Step(chunk.int(), positions, table[0, blocks] * BLOCK_SIZE + offsets, start, table, positions[:0])
                for table in tables
            ]
            model.run(*steps)
            for part in torch.arange(len(chunk), dtype=torch.int32).split(limits.max_logits):
                model.head(steps[0], part)
                rows.append(model.logits[: len(part)].clone())
            done += len(chunk)
    wanted = model.plain(ids)
    wanted = wanted - wanted.mean(-1, keepdim=True)
    found = torch.cat(rows)
    error = (found - found.mean(-1, keepdim=True) - wanted).norm() / wanted.norm().clamp_min(1e-9)
    return float(error) if bool(error.isfinite()) else float("inf")


def _notes(why: str, model: TransformersModel, outline: Outline, difference: float) -> list[str]:
    notes = [
        f"served through transformers, slower than the native decoder would be: {why}",
        f"logits of a prompt differ from those of plain transformers by {difference:.3%} of their size",
    ]
    if outline.found.others:
        others = ", ".join(sorted(outline.found.others))
        notes.append(f"computed by torch, with last bits that vary with the batch: {others}")
    return notes + [f"without a kernel, computed by the torch reference: {what}" for what in model.fallbacks]
