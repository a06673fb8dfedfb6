"""``Decoder``: a Llama-like model as two programs over fixed buffers, one for the layers and one for the head.

Knows the families of ``DecoderConfig``: fused qkv and gate-up, optional biases and q/k norms, tied or untied
head, dense or packed weights and embeddings, and the paged KV cache. Does not know requests, nor how an operation is
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.checkpoint.source import ModelSource
from qserve.kernels import pages, registry
from qserve.kernels.ops import (
    BLOCK_SIZE,
    Argmax,
    Attention,
    Embed,
    Executor,
    Gather,
    Linear,
    LogSoftmax,
    Op,
    RMSNorm,
    RopeKV,
    SiluMul,
    Step,
)
from qserve.kernels.prepack import round_to_int8
from qserve.runtime.models.config import DecoderConfig
from qserve.runtime.models.kv_cache import cache_center, cache_scales
from qserve.runtime.models.rope import rope_tables

Weight = Tensor | QuantizedWeight
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DecoderLimits:
    """The sizes of the buffers: tokens and logit rows of a step, positions of a sequence, blocks of the pool."""

    max_tokens: int
    max_logits: int
    max_positions: int
    num_blocks: int

    def workspace_bytes(self, config: DecoderConfig, activations: torch.dtype = torch.float32) -> int:
        """Bytes of activations and logits."""
        per_token = config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size
        stream = self.max_tokens * config.hidden_size + self.max_logits * (config.hidden_size + config.vocab_size)
        return 4 * stream + activations.itemsize * (self.max_tokens * per_token + self.max_logits * config.hidden_size)


class Decoder:
    """Runs steps. ``logits`` float32 [max_logits, vocab] and ``greedy`` int32 [max_logits] hold the last head run;
    ``kv`` [layers, 2, blocks, kv_heads * head_dim * 16] is the cache. They are where the executor places them.

    ``kv_dtype`` float32, float16 or bfloat16, or int8 or float8_e4m3fn with the scales of the checkpoint.

    ``fallbacks``: the operations for which the executor has no kernel, as ``registry.fallbacks`` says them.

    Raises ``CheckpointError`` where a weight or a scale is missing or misshapen.
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
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self._source = source
        self._packed = frozenset(source.linears())
        layers, tokens, rows = config.num_hidden_layers, limits.max_tokens, limits.max_logits
        self.placement = executor.placement
        device, dtype = self.placement.device, self.placement.activations
        self._kv_dtype = kv_dtype
        self._pages: list[tuple[Tensor, Tensor]] = []
        self.resize_cache(limits.num_blocks)
        self._cosine, self._sine = (x.to(device) for x in rope_tables(config, limits.max_positions))
        self._x = torch.empty(tokens, config.hidden_size, device=device)
        self._normed = torch.empty(tokens, config.hidden_size, dtype=dtype, device=device)
        self._qkv = torch.empty(tokens, config.q_size + 2 * config.kv_size, dtype=dtype, device=device)
        self._attended = torch.empty(tokens, config.q_size, dtype=dtype, device=device)
        self._gate_up = torch.empty(tokens, 2 * config.intermediate_size, dtype=dtype, device=device)
        self._activated = torch.empty(tokens, config.intermediate_size, dtype=dtype, device=device)
        self.logits = torch.empty(rows, config.vocab_size, device=device)
        self.greedy = torch.empty(rows, dtype=torch.int32, device=device)
        self.states = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)

        table, _ = self._weight("model.embed_tokens", config.vocab_size, config.hidden_size)
        self._body = executor.program(tokens)
        embed = Embed(table, self._x, self.greedy)
        self._body.add([embed])
        self.fallbacks = registry.fallbacks(executor, [embed])
        for i in range(layers):
            ops = self._layer(i)  # one layer at a time is in memory in both forms
            self._body.add(ops)
            self.fallbacks += registry.fallbacks(executor, ops)
            if progress:
                progress(i + 1, layers)
        self._head = executor.program(rows)
        head = self._head_ops(table, int8_head)
        self._head.add(head)
        self.fallbacks += registry.fallbacks(executor, head)
        self._final_norm = executor.program(rows)
        self._final_norm.add(head[:2])
        self._log_softmax = executor.program(rows)
        self._log_softmax.add([LogSoftmax(self.logits)])

    def run(self, step: Step) -> None:
        """Embed the tokens, write their keys and values, and leave the last hidden states for ``head``."""
        self._body.run(step)

    def head(self, step: Step, rows: Tensor) -> None:
        """Logits and greedy tokens of up to ``max_logits`` tokens ``rows`` (int32) of the step just run."""
        self._head.run(step if rows is step.logit_rows else replace(step, logit_rows=rows))

    def final_norm(self, step: Step, rows: Tensor) -> None:
        """Leave in ``states`` [max_logits, hidden_size] what the head reads of up to ``max_logits`` tokens ``rows``
        (int32) of the step just run: their hidden states behind the last norm."""
        self._final_norm.run(replace(step, logit_rows=rows))

    def log_softmax(self, step: Step, rows: Tensor) -> None:
        """Turn the logits just computed into log-probabilities, in place."""
        self._log_softmax.run(replace(step, logit_rows=rows))

    def resize_cache(self, num_blocks: int) -> None:
        """A cache of ``num_blocks``, whose content is undefined. After the load only an executor that asks for its
        address in every run sees it: that of a GPU."""
        config = self.config
        layers, per_block = config.num_hidden_layers, config.kv_size * BLOCK_SIZE
        shape, device = (layers, 2, num_blocks, per_block), self.placement.device
        if device.type == "cpu":
            self.kv = pages.empty(shape, self._kv_dtype)
        else:
            self.kv = torch.empty(shape, dtype=self._kv_dtype, device=device)
        views = [self._views(i) for i in range(layers)]
        for old, new in zip(self._pages, views):
            for tensor, other in zip(old, new):
                tensor.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())
        self._pages = self._pages or views

    def _views(self, i: int) -> tuple[Tensor, Tensor]:
        """The keys and values of layer ``i`` as the operations see them."""
        shape = (-1, self.config.num_key_value_heads, BLOCK_SIZE, self.config.head_dim)
        values = self.kv[i, 1].view(shape)
        if self.placement.keys_by_token:
            return self.kv[i, 0].view(shape).transpose(2, 3), values
        return self.kv[i, 0].view(shape[0], shape[1], shape[3], shape[2]), values

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks of keys and values, in order: ``(source, destination)``."""
        for source, destination in copies:
            self.kv[:, :, destination] = self.kv[:, :, source]

    def _layer(self, i: int) -> list[Op]:
        config, prefix = self.config, f"model.layers.{i}"
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        k_cache, v_cache = self._pages[i]
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norm = self._tensor(f"{prefix}.input_layernorm.weight", config.hidden_size)
        post_norm = self._tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        q_norm = self._tensor(f"{attention}.q_norm.weight", dim) if config.qk_norm else None
        k_norm = self._tensor(f"{attention}.k_norm.weight", dim) if config.qk_norm else None
        k_scale, v_scale = cache_scales(self._source, attention, kv_heads, self.kv.dtype)
        k_center = cache_center(self._source, attention, kv_heads, dim, self.kv.dtype)
        qkv = [
            (f"{attention}.q_proj", config.q_size),
            (f"{attention}.k_proj", config.kv_size),
            (f"{attention}.v_proj", config.kv_size),
        ]
        gate_up = [(f"{mlp}.gate_proj", config.intermediate_size), (f"{mlp}.up_proj", config.intermediate_size)]
        return [
            RMSNorm(self._x, norm, self._normed, config.rms_norm_eps),
            *self._fused(qkv, self._normed, self._qkv),
            RopeKV(
                self._qkv, self._cosine, self._sine, k_cache, v_cache, heads, kv_heads, dim,
                q_norm, k_norm, config.rms_norm_eps, k_scale, v_scale, k_center,
            ),
            Attention(
                self._qkv, self._attended, k_cache, v_cache, heads, kv_heads, dim, dim**-0.5, config.windows[i],
                k_scale, v_scale,
            ),
            self._linear(f"{attention}.o_proj", config.hidden_size, self._attended, self._x, accumulate=True),
            RMSNorm(self._x, post_norm, self._normed, config.rms_norm_eps),
            *self._fused(gate_up, self._normed, self._gate_up),
            SiluMul(self._gate_up, self._activated),
            self._linear(f"{mlp}.down_proj", config.hidden_size, self._activated, self._x, accumulate=True),
        ]  # fmt: skip

    def _head_ops(self, table: Weight, int8: bool) -> list[Op]:
        config, rows = self.config, self.limits.max_logits
        norm = self._tensor("model.norm.weight", config.hidden_size)
        last, normed = torch.empty(rows, config.hidden_size, device=self.placement.device), self.states
        weight, bias = table, None
        if "lm_head" in self._packed or not config.tie_word_embeddings:
            weight, bias = self._weight("lm_head", config.vocab_size, config.hidden_size)
        if int8 and isinstance(weight, Tensor):
            weight = round_to_int8(weight)
        return [
            Gather(self._x, last),
            RMSNorm(last, norm, normed, config.rms_norm_eps, rows="logits"),
            Linear(normed, weight, self.logits, bias, rows="logits"),
            Argmax(self.logits, self.greedy),
        ]

    def _fused(self, modules: list[tuple[str, int]], x: Tensor, out: Tensor) -> list[Op]:
        """One product for modules that share an input, or one each where their schemes differ."""
        loaded = [self._weight(module, size, x.shape[1]) for module, size in modules]
        dense = [w for w, _ in loaded if isinstance(w, Tensor)]
        packed = [w for w, _ in loaded if isinstance(w, QuantizedWeight)]
        biases = [torch.zeros(size) if b is None else b.float() for (_, b), (_, size) in zip(loaded, modules)]
        bias = torch.cat(biases) if any(b is not None for _, b in loaded) else None
        if len(dense) == len(loaded) and len({w.dtype for w in dense}) == 1:
            return [Linear(x, torch.cat(dense), out, bias)]
        if len(packed) == len(loaded):
            try:
                return [Linear(x, concat_rows(packed), out, bias)]
            except ValueError:
                pass  # different schemes: separate products into the columns of one buffer
        ops: list[Op] = []
        start = 0
        for (weight, own), (_, size) in zip(loaded, modules):
            ops.append(Linear(x, weight, out[:, start : start + size], own))
            start += size
        return ops

    def _linear(self, module: str, size: int, x: Tensor, out: Tensor, *, accumulate: bool) -> Linear:
        weight, bias = self._weight(module, size, x.shape[1])
        return Linear(x, weight, out, bias, accumulate)

    def _weight(self, module: str, out: int, inp: int) -> tuple[Weight, Tensor | None]:
        """The weight of a linear without its bias, and the bias."""
        if module in self._packed:
            packed = self._source.linear(module)
            if (packed.out_features, packed.in_features) != (out, inp):
                raise CheckpointError(
                    f"{self._source.name}: {module} is {packed.out_features}x{packed.in_features}, "
                    f"the configuration says {out}x{inp}"
                )
            packed.check()
            return replace(packed, bias=None), packed.bias
        weight = self._tensor(f"{module}.weight", out, inp)
        bias = self._tensor(f"{module}.bias", out) if self._source.has(f"{module}.bias") else None
        return weight, bias

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._source.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._source.name}: {name} is {tuple(tensor.shape)}, the configuration says {shape}"
            )
        return tensor.contiguous()
