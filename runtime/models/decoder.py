"""``Decoder``: a model of any native family and its paged KV cache. The layers and the head are programs over fixed
buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from qserve.checkpoint.source import ModelSource
from qserve.kernels import registry
from qserve.kernels.executor import Executor, Placement, Program, Step
from qserve.kernels.kv_cache import head_numel, stored_as
from qserve.kernels.ops import BLOCK_SIZE, PACKED_KV, Cast, LogSoftmax
from qserve.runtime.cache import CacheLayout, CacheSpec
from qserve.runtime.models.buffers import Buffers
from qserve.runtime.models.config import DecoderConfig
from qserve.runtime.models.layers import LayerBuilder
from qserve.runtime.models.lora_layers import LoraLayers
from qserve.runtime.models.weights import Headers, Weights
from qserve.runtime.parallel.group import RankGroup

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DecoderLimits:
    """The sizes of the buffers: tokens and logit rows of a step, positions of a sequence, blocks of the pool, and slots
    for sequences whose states layers keep. ``hidden_layers``: those whose input is an output of the decoder."""

    max_tokens: int
    max_logits: int
    max_positions: int
    num_blocks: int
    num_states: int = 0
    hidden_layers: tuple[int, ...] = ()

    def workspace_bytes(
        self, config: DecoderConfig, activations: torch.dtype = torch.float32, group: RankGroup | None = None
    ) -> int:
        """Bytes of activations and logits."""
        placement = Placement(torch.device("meta"), activations)
        return Buffers.allocate(
            config, placement, tokens=self.max_tokens, rows=self.max_logits, positions=1, group=group,
            hidden_layers=len(self.hidden_layers),
        ).nbytes  # fmt: skip


class Decoder:
    """Runs steps. ``logits`` float32 [max_logits, vocab] and ``greedy`` int32 [max_logits] hold the last head run;
    ``kv`` [places, 2, blocks, kv_heads * head_dim * 16] is the cache, or [places, 1, blocks, …] of latents. Layers of
    different groups share a place. All are where the executor places them. ``sequence_states``: what layers keep of
    each sequence, each tensor [num_states, …]. ``hidden``: for each of ``limits.hidden_layers`` float32 [max_tokens,
    hidden_size], the residual stream of the step just run as it was before that layer; behind the last one for the
    number of layers. A residual multiplier is left out of it (``LayerBuilder``).

    ``group``: of the ranks that share the model, if there are several. With a shard of the weights, ``kv`` has its own
    key heads, and ``greedy`` is that of the first rank; all must run the same steps and heads. With a stage, ``kv`` has
    its own layers. ``x`` float32 [max_tokens, hidden_size] is the residual stream: behind the last of those layers once
    a step was run, and where another stage is before this one, its output is put there first. Only the last stage has a
    head, and the norm before it.

    ``kv_dtype``: float32, float16 or bfloat16, int8 or float8_e4m3fn with the scales of the checkpoint, or
    ``PACKED_KV``.

    ``lora``: gets the places where adapters act. ``slots`` [slots, places, 2, …], in this machine's memory, are
    numbered behind the blocks of the cache (``block_of``).

    ``fallbacks``: the operations for which the executor has no kernel, as ``registry.fallbacks`` names them.

    Raises ``CheckpointError`` where a weight or a scale is missing or has the wrong shape.
    """

    def __init__(
        self,
        source: ModelSource,
        config: DecoderConfig,
        executor: Executor,
        limits: DecoderLimits,
        *,
        kv_dtype: torch.dtype = torch.float16,
        int8_head: bool = False,
        lora: LoraLayers | None = None,
        group: RankGroup | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        group = group or RankGroup()
        self.limits, self.lora = limits, lora
        self.layout = cache_layout(config, group)
        stage = group.stage
        layers, tokens, rows = stage.layers(config.num_hidden_layers), limits.max_tokens, limits.max_logits
        self.executor, self.placement = executor, executor.placement
        self._kv_dtype, self.slots = kv_dtype, torch.empty(0)
        self._pages: list[tuple[Tensor, ...]] = []
        self.resize_cache(limits.num_blocks)
        device = self.placement.device
        kept = {
            layer: [torch.zeros(limits.num_states, *shape, device=device) for shape in spec.shapes]
            for layer, spec in self.layout.states.items()
        }
        self.sequence_states = [state for states in kept.values() for state in states]
        self._buffers = buffers = Buffers.allocate(
            config, self.placement, tokens=tokens, rows=rows, positions=limits.max_positions, group=group,
            hidden_layers=len(limits.hidden_layers),
        )  # fmt: skip
        self.x, self.logits, self.greedy, self.states = buffers.x, buffers.logits, buffers.greedy, buffers.states
        self.hidden = buffers.hidden
        outputs = {layer: Cast(buffers.x, out) for layer, out in zip(limits.hidden_layers, self.hidden)}
        builder = LayerBuilder(config, Weights(source), buffers, kv_dtype, lora, group)

        self._body: list[tuple[int, Program]] = []  # consecutive layers of one group, which see the same step
        embed = builder.embed() if stage.is_first else []
        self.fallbacks = registry.fallbacks(executor, embed)
        # Before the layers: a large head needs several times its size while it is laid out.
        self._head, head = executor.program(rows), builder.head(int8=int8_head) if stage.is_last else []
        self._head.add(head)
        head_fallbacks = registry.fallbacks(executor, head)
        del head
        for i in layers:
            if i in kept:
                here = self._body[-1][0] if self._body else 0  # any step does: it has no blocks
            else:
                here, place = self.layout.place(i)
            if not self._body or self._body[-1][0] != here:
                self._body.append((here, executor.program(tokens)))
            program = self._body[-1][1]
            if i == 0:
                program.add(embed)
            if i in outputs:
                program.add([outputs[i]])
            ops = builder.layer(i, kept[i] if i in kept else self._pages[place])
            program.add(ops)
            self.fallbacks += registry.fallbacks(executor, ops)
            del ops  # what was read of this layer is gone before the next one is read
            if progress:
                progress(i - layers.start + 1, len(layers))
        if layers.stop in outputs:
            program.add([outputs[layers.stop]])
        self.fallbacks += head_fallbacks
        self._final_norm = executor.program(rows)
        self._final_norm.add(builder.final_norm() if stage.is_last else [])
        self._log_softmax = executor.program(rows)
        self._log_softmax.add([LogSoftmax(self.logits)])

    def run(self, *steps: Step) -> None:
        """Embed the tokens, write their keys and values, and leave the last hidden states for ``head``. ``steps``: the
        step as each group of layers sees it; they differ in their slots and block tables."""
        for group, program in self._body:
            program.run(steps[group])

    def head(self, step: Step, rows: Tensor) -> None:
        """Logits and greedy tokens of up to ``max_logits`` tokens ``rows`` (int32) of the step just run."""
        self._head.run(step if rows is step.logit_rows else replace(step, logit_rows=rows))

    def final_norm(self, step: Step, rows: Tensor) -> None:
        """Fill ``states`` [max_logits, hidden_size] with the input of the head for up to ``max_logits`` tokens ``rows``
        (int32) of the step just run: their hidden states behind the last norm."""
        self._final_norm.run(replace(step, logit_rows=rows))

    def log_softmax(self, step: Step, rows: Tensor) -> None:
        """Turn the logits just computed into log-probabilities, in place."""
        self._log_softmax.run(replace(step, logit_rows=rows))

    def resize_cache(self, num_blocks: int) -> None:
        """Make a cache of ``num_blocks`` with undefined content. After the load only an executor that asks for the
        cache's address in every run sees it: that of a GPU."""
        spec, device = self.layout.groups[0].spec, self.placement.device
        width = spec.kv_heads * head_numel(self._kv_dtype, spec.head_dim)
        shape = self.layout.places, 1 if spec.latent else 2, num_blocks, width
        self.kv = torch.empty(shape, dtype=stored_as(self._kv_dtype), device=device)
        views = [pages_of(place, spec, self.placement) for place in self.kv]
        for old, new in zip(self._pages, views):
            for tensor, other in zip(old, new):
                tensor.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())
        self._pages = self._pages or views


def cache_layout(config: DecoderConfig, group: RankGroup) -> CacheLayout:
    """What a rank keeps of past tokens: the key heads and the states of its shard, in the layers of its stage."""
    _, keys = group.shard.heads(config.num_attention_heads, config.num_key_value_heads)
    delta = config.delta.part(group.shard) if config.delta is not None else None
    own = replace(config, num_key_value_heads=len(keys), delta=delta)
    return own.cache_layout.part(group.stage.layers(config.num_hidden_layers))


class HoldsBlocks(Protocol):
    """Has a cache [places, 2, blocks, …] and slots behind it [slots, places, 2, …]."""

    slots: Tensor

    @property
    def kv(self) -> Tensor: ...


def block_of(model: HoldsBlocks, number: int) -> Tensor:
    """The keys and values in a block or slot: [places, 2, …]."""
    kv = model.kv
    return kv[:, :, number] if number < kv.shape[2] else model.slots[number - kv.shape[2]]


def copy_blocks(model: HoldsBlocks, copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks and slots of keys and values, in order: ``(source, destination)``."""
    for source, destination in copies:
        block_of(model, destination).copy_(block_of(model, source))


def copy_states(states: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy what layers keep of sequences from slot to slot, in order: ``(source, destination)``."""
    for source, destination in copies:
        for state in states:
            state[destination] = state[source]


def pages_of(place: Tensor, spec: CacheSpec, placement: Placement) -> tuple[Tensor, ...]:
    """The keys and values of a layer's place [2, blocks, …], or its latents [1, blocks, …], in the shapes that the
    operations see."""
    if spec.latent:
        return (place[0].view(-1, BLOCK_SIZE, spec.head_dim),)
    if place.dtype == stored_as(PACKED_KV):
        keys, values = place.unflatten(-1, (spec.kv_heads, -1))
        return keys, values
    shape = (-1, spec.kv_heads, BLOCK_SIZE, spec.head_dim)
    if placement.keys_by_token:
        return place[0].view(shape).transpose(2, 3), place[1].view(shape)
    return place[0].view(shape[0], shape[1], shape[3], shape[2]), place[1].view(shape)


def missing_kernels(
    source: ModelSource,
    config: DecoderConfig,
    executor: Executor,
    kv_dtype: torch.dtype,
    lora: LoraLayers | None = None,
) -> Counter[str]:
    """The value of ``Decoder.fallbacks``, from the headers of ``source`` alone. ``lora`` gets the places where adapters
    act in the whole model."""
    placement = executor.placement
    buffers = Buffers.allocate(config, placement, tokens=1, rows=1, positions=1)
    builder = LayerBuilder(config, Headers(source), buffers, kv_dtype, lora)
    layout = config.cache_layout
    spec = layout.groups[0].spec
    width = spec.kv_heads * head_numel(kv_dtype, spec.head_dim)
    layer = torch.empty(2, 1, width, dtype=stored_as(kv_dtype), device=placement.device)
    pages_of_layer = pages_of(layer, spec, placement)
    found = registry.fallbacks(executor, builder.embed())
    for i in range(config.num_hidden_layers):
        kept: Sequence[Tensor] = pages_of_layer
        if (state := layout.states.get(i)) is not None:
            kept = [torch.empty(1, *shape, device=placement.device) for shape in state.shapes]
        found += registry.fallbacks(executor, builder.layer(i, kept))
    return found + registry.fallbacks(executor, builder.head(int8=False))
