"""``LayerBuilder``: the operations of embeddings, attention, feed-forward and head, from the description of a family.

Weights are read when their operations are built, so that one layer at a time is in memory in both forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.kernels.ops import (
    Activation,
    Argmax,
    Attention,
    Embed,
    Gather,
    Linear,
    Op,
    Placement,
    RMSNorm,
    RopeKV,
)
from qserve.kernels.prepack import round_to_int8
from qserve.runtime.models.config import DecoderConfig, is_classifier
from qserve.runtime.models.kv_scales import cache_center, cache_scales
from qserve.runtime.models.rope import rope_tables
from qserve.runtime.models.weights import Weight, Weights


@dataclass(frozen=True)
class Buffers:
    """The buffers that the operations of a decoder write, and its rotations.

    x           [tokens, hidden_size] float32: the residual stream, divided by the family's residual multiplier
    normed, qkv, attended, gate_up, activated  [tokens, …]
    last        [rows, hidden_size] float32: the residual stream of the rows whose logits are wanted
    states      [rows, hidden_size]: the same behind the last norm
    logits      [rows, vocab_size] float32
    greedy      [rows] int32
    cosine, sine  float32 [positions, rotary_dim / 2]
    """

    x: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    activated: Tensor
    last: Tensor
    states: Tensor
    logits: Tensor
    greedy: Tensor
    cosine: Tensor
    sine: Tensor

    @classmethod
    def allocate(
        cls, config: DecoderConfig, placement: Placement, *, tokens: int, rows: int, positions: int
    ) -> Buffers:
        device, dtype = placement.device, placement.activations
        hidden, inner = config.hidden_size, config.intermediate_size

        def activations(count: int, width: int) -> Tensor:
            return torch.empty(count, width, dtype=dtype, device=device)

        cosine, sine = (table.to(device) for table in rope_tables(config, positions))
        return cls(
            x=torch.empty(tokens, hidden, device=device),
            normed=activations(tokens, hidden),
            qkv=activations(tokens, config.q_size + 2 * config.kv_size),
            attended=activations(tokens, config.q_size),
            gate_up=activations(tokens, 2 * inner),
            activated=activations(tokens, inner),
            last=torch.empty(rows, hidden, device=device),
            states=activations(rows, hidden),
            logits=torch.zeros(rows, config.vocab_size, device=device),  # a classifier leaves them so
            greedy=torch.empty(rows, dtype=torch.int32, device=device),
            cosine=cosine,
            sine=sine,
        )


class LayerBuilder:
    """Builds the operations of a model, part by part, in the order in which they run.

    Multipliers take no operation of their own. The residual stream is kept divided by the residual multiplier, so that
    a sublayer's output is added as it is. A norm undoes any factor, and its epsilon is smaller by the square of the
    multiplier. The multiplier of the logits is in the norm before them.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, buffers: Buffers, kv_dtype: torch.dtype) -> None:
        self._config, self._weights, self._buffers = config, weights, buffers
        self._kv_dtype = kv_dtype
        self._eps = config.rms_norm_eps / config.multipliers.residual**2
        self._table: Weight | None = None

    def embed(self) -> Embed:
        config, buffers = self._config, self._buffers
        self._table, _ = self._weights.linear(config.modules.embedding, config.vocab_size, config.hidden_size)
        scale = config.multipliers.embedding / config.multipliers.residual
        return Embed(self._table, buffers.x, buffers.greedy, scale)

    def layer(self, i: int, k_cache: Tensor, v_cache: Tensor) -> list[Op]:
        modules, layer = self._config.modules, f"{self._config.modules.layers}.{i}"
        return [
            self._norm(f"{layer}.{modules.attention_norm}"),
            *self._attention(i, layer, k_cache, v_cache),
            self._norm(f"{layer}.{modules.mlp_norm}"),
            *self._mlp(layer),
        ]

    def final_norm(self) -> list[Op]:
        """The states of the rows whose logits are wanted, as transformers returns them."""
        return self._last_norm(1.0)

    def head(self, *, int8: bool) -> list[Op]:
        """Logits and greedy tokens; call it after ``embed``. ``int8`` rounds a dense output layer. A classifier has no
        output layer, so nothing computes them."""
        if is_classifier(self._weights.source.config):
            return []
        config, buffers = self._config, self._buffers
        multiplier = config.multipliers.logits
        weight, bias = self._table, None
        output = config.modules.head
        if self._weights.is_quantized(output) or not config.tie_word_embeddings:
            weight, bias = self._weights.linear(output, config.vocab_size, config.hidden_size)
        assert weight is not None
        if int8 and isinstance(weight, Tensor):
            weight = round_to_int8(weight)
        if bias is not None and multiplier != 1.0:
            bias = bias.float() * multiplier
        return [
            *self._last_norm(multiplier),
            Linear(buffers.states, weight, buffers.logits, bias, rows="logits"),
            Argmax(buffers.logits, buffers.greedy),
        ]

    def _last_norm(self, multiplier: float) -> list[Op]:
        buffers = self._buffers
        weight = self._weights.tensor(f"{self._config.modules.norm}.weight", self._config.hidden_size)
        if multiplier != 1.0:
            weight = weight.float() * multiplier
        return [
            Gather(buffers.x, buffers.last),
            RMSNorm(buffers.last, weight, buffers.states, self._eps, rows="logits"),
        ]

    def _norm(self, module: str) -> Op:
        weight = self._weights.tensor(f"{module}.weight", self._config.hidden_size)
        return RMSNorm(self._buffers.x, weight, self._buffers.normed, self._eps)

    def _attention(self, i: int, layer: str, k_cache: Tensor, v_cache: Tensor) -> list[Op]:
        config, buffers, weights = self._config, self._buffers, self._weights
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        module = f"{layer}.{config.modules.attention}"
        q_norm = k_norm = None
        if config.family.qk_norm:
            q_norm, k_norm = (weights.tensor(f"{module}.{name}.weight", dim) for name in ("q_norm", "k_norm"))
        cosine, sine = buffers.cosine, buffers.sine
        if not config.rotated[i]:
            cosine = sine = cosine.new_empty(len(cosine), 0)
        k_scale, v_scale = cache_scales(weights.source, module, kv_heads, self._kv_dtype)
        k_center = cache_center(weights.source, module, kv_heads, dim, self._kv_dtype)
        sizes = [config.q_size, config.kv_size, config.kv_size]
        if len(config.modules.qkv) == 1:
            sizes = [sum(sizes)]
        return [
            *self._joined(layer, config.modules.qkv, sizes, buffers.normed, buffers.qkv),
            RopeKV(
                buffers.qkv, cosine, sine, k_cache, v_cache, heads, kv_heads, dim,
                q_norm, k_norm, config.rms_norm_eps, k_scale, v_scale, k_center,
            ),
            Attention(
                buffers.qkv, buffers.attended, k_cache, v_cache, heads, kv_heads, dim, config.attention_scale,
                config.windows[i], k_scale, v_scale,
            ),
            self._to_stream(f"{layer}.{config.modules.out}", buffers.attended),
        ]  # fmt: skip

    def _mlp(self, layer: str) -> list[Op]:
        buffers, modules = self._buffers, self._config.modules
        sizes = [buffers.gate_up.shape[1] // len(modules.up)] * len(modules.up)
        return [
            *self._joined(layer, modules.up, sizes, buffers.normed, buffers.gate_up),
            Activation(buffers.gate_up, buffers.activated, "silu", gated=True),
            self._to_stream(f"{layer}.{modules.down}", buffers.activated),
        ]

    def _to_stream(self, module: str, x: Tensor) -> Linear:
        weight, bias = self._weights.linear(module, self._config.hidden_size, x.shape[1])
        return Linear(x, weight, self._buffers.x, bias, accumulate=True)

    def _joined(self, layer: str, names: Sequence[str], sizes: Sequence[int], x: Tensor, out: Tensor) -> list[Op]:
        """One product for the linears ``names`` of ``layer`` (with ``sizes`` outputs) that share an input, or one
        product for each where their schemes differ."""
        loaded = [(*self._weights.linear(f"{layer}.{name}", n, x.shape[1]), n) for name, n in zip(names, sizes)]
        dense = [w for w, _, _ in loaded if isinstance(w, Tensor)]
        packed = [w for w, _, _ in loaded if isinstance(w, QuantizedWeight)]
        bias = None
        if device := next((b.device for _, b, _ in loaded if b is not None), None):
            bias = torch.cat([torch.zeros(n, device=device) if b is None else b.float() for _, b, n in loaded])
        if len(dense) == len(loaded) and len({w.dtype for w in dense}) == 1:
            return [Linear(x, torch.cat(dense), out, bias)]
        if len(packed) == len(loaded):
            try:
                return [Linear(x, concat_rows(packed), out, bias)]
            except ValueError:
                pass  # different schemes: separate products into the columns of one buffer
        ops: list[Op] = []
        start = 0
        for weight, own, size in loaded:
            ops.append(Linear(x, weight, out[:, start : start + size], own))
            start += size
        return ops
