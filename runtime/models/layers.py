"""``LayerBuilder``: the operations of embeddings, attention, feed-forward and head, from the description of a family.

Weights are read when their operations are built, so that one layer at a time is in memory in both forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.kernels.ops import (
    Activation,
    Argmax,
    Attention,
    Cast,
    Embed,
    Gather,
    HeadNorm,
    LayerNorm,
    Linear,
    Op,
    Placement,
    PositionEmbed,
    RMSNorm,
    RopeKV,
    Rows,
    SigmoidMul,
    SoftCap,
)
from qserve.kernels.prepack import round_to_int8
from qserve.runtime.models.config import DecoderConfig, is_classifier
from qserve.runtime.models.kv_scales import cache_center, cache_scales
from qserve.runtime.models.lora_layers import LoraLayers
from qserve.runtime.models.moe import MoeBuffers, routed
from qserve.runtime.models.rope import query_scale, rope_tables
from qserve.runtime.models.row_order import Orders, element_order, qkv_orders
from qserve.runtime.models.weights import Weight, Weights


@dataclass(frozen=True)
class Buffers:
    """The buffers that the operations of a decoder write, and its rotations.

    x           [tokens, hidden_size] float32: the residual stream, divided by the family's residual multiplier
    sublayer    [tokens, hidden_size] float32: the output of a sublayer, where a norm follows
    normed, qkv, attended, gate_up, activated  [tokens, …]
    last        [rows, hidden_size] float32: the residual stream of the rows whose logits are wanted
    states      [rows, hidden_size]: the same behind the last norm
    logits      [rows, vocab_size] float32
    greedy      [rows] int32
    moe         the buffers of experts, None in models without
    rotations   cosine and sine, float32 [positions, rotary_dim / 2], for each of the ``rope_kinds``
    q_scale     float32 [positions], or None
    """

    x: Tensor
    sublayer: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    activated: Tensor
    last: Tensor
    states: Tensor
    logits: Tensor
    greedy: Tensor
    moe: MoeBuffers | None
    rotations: dict[str | None, tuple[Tensor, Tensor]]
    q_scale: Tensor | None

    @classmethod
    def allocate(
        cls, config: DecoderConfig, placement: Placement, *, tokens: int, rows: int, positions: int
    ) -> Buffers:
        device, dtype = placement.device, placement.activations
        hidden, inner = config.hidden_size, config.intermediate_size

        def activations(count: int, width: int) -> Tensor:
            return torch.empty(count, width, dtype=dtype, device=device)

        def rotation(kind: str | None) -> tuple[Tensor, Tensor]:
            cosine, sine = rope_tables(config, kind, positions)
            return cosine.to(device), sine.to(device)

        scale = query_scale(config, positions)
        gate_up = activations(tokens, 2 * inner if config.family.gated else inner)
        behind = config.modules.attention_out_norm or config.modules.mlp_out_norm
        return cls(
            x=torch.empty(tokens, hidden, device=device),
            sublayer=torch.empty(tokens if behind else 0, hidden, device=device),
            normed=activations(tokens, hidden),
            qkv=activations(tokens, config.q_size + 2 * config.kv_size),
            attended=activations(tokens, config.q_size),
            gate_up=gate_up,
            activated=activations(tokens, inner) if config.family.gated else gate_up,
            last=torch.empty(rows, hidden, device=device),
            states=activations(rows, hidden),
            logits=torch.zeros(rows, config.vocab_size, device=device),  # a classifier leaves them so
            greedy=torch.empty(rows, dtype=torch.int32, device=device),
            moe=MoeBuffers.allocate(config.moe, hidden, placement, tokens) if config.moe else None,
            rotations={kind: rotation(kind) for kind in config.rope_kinds},
            q_scale=None if scale is None else scale.to(device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of activations and logits."""
        held = {id(x := getattr(self, field.name)): x for field in fields(self) if field.name != "q_scale"}
        return sum(buffer.nbytes for buffer in held.values() if isinstance(buffer, Tensor | MoeBuffers))


class LayerBuilder:
    """Builds the operations of a model, part by part, in the order in which they run.

    Multipliers take no operation of their own. The residual stream is kept divided by the residual multiplier, so that
    a sublayer's output is added as it is. A norm undoes any factor, and its epsilon is smaller by the square of the
    multiplier. The multiplier of the logits is in the norm before them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        buffers: Buffers,
        kv_dtype: torch.dtype,
        lora: LoraLayers | None = None,
    ) -> None:
        self._config, self._weights, self._buffers = config, weights, buffers
        self._kv_dtype, self._lora = kv_dtype, lora
        self._eps = config.rms_norm_eps / config.multipliers.residual**2
        self._table: Weight | None = None

    def embed(self) -> list[Op]:
        config, buffers = self._config, self._buffers
        self._table, _ = self._weights.linear(config.modules.embedding, config.vocab_size, config.hidden_size)
        scale = config.multipliers.embedding / config.multipliers.residual
        ops: list[Op] = [Embed(self._table, buffers.x, buffers.greedy, scale)]
        if (positions := config.modules.positions) is not None:
            rows = config.max_position_embeddings + config.modules.position_offset
            table = self._weights.tensor(f"{positions}.weight", rows, config.hidden_size)
            ops.append(PositionEmbed(table, buffers.x, config.modules.position_offset))
        return ops

    def layer(self, i: int, k_cache: Tensor, v_cache: Tensor) -> list[Op]:
        modules, layer = self._config.modules, f"{self._config.modules.layers}.{i}"
        parallel = self._config.parallel
        x, read = self._input(layer, modules.attention_norm)
        attend, add = self._attention(i, layer, x, k_cache, v_cache)
        y, read_too = (x, []) if parallel and modules.mlp_norm is None else self._input(layer, modules.mlp_norm)
        sparse = self._config.moe and self._config.moe.sparse[i]
        feed, add_too = self._experts(layer, y) if sparse else self._mlp(layer, y)
        if parallel:  # nothing is added to the stream before both have read it
            return [*read, *attend, *read_too, *feed, *add, *add_too]
        return [*read, *attend, *add, *read_too, *feed, *add_too]

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
        cap = config.logit_cap
        return [
            *self._last_norm(multiplier),
            Linear(buffers.states, weight, buffers.logits, bias, rows="logits"),
            *([SoftCap(buffers.logits, cap)] if cap else []),
            Argmax(buffers.logits, buffers.greedy),
        ]

    def _last_norm(self, multiplier: float) -> list[Op]:
        buffers, module = self._buffers, self._config.modules.norm
        return [
            Gather(buffers.x, buffers.last),
            self._norm(module, buffers.last, buffers.states, "logits", multiplier),
        ]

    def _input(self, layer: str, norm: str | None) -> tuple[Tensor, list[Op]]:
        """The input of a sublayer, and the operations that make it."""
        x, normed = self._buffers.x, self._buffers.normed
        if norm is not None:
            return normed, [self._norm(f"{layer}.{norm}", x, normed)]
        return (x, []) if x.dtype == normed.dtype else (normed, [Cast(x, normed)])

    def _norm(self, module: str, x: Tensor, out: Tensor, rows: Rows = "tokens", multiplier: float = 1.0) -> Op:
        family, width = self._config.family, self._config.hidden_size
        weight = self._norm_weight(module, (width,)) if family.norm_weight else torch.ones(width, device=x.device)
        bias = self._weights.tensor(f"{module}.bias", width) if family.norm_bias else None
        if multiplier != 1.0:
            weight, bias = weight.float() * multiplier, None if bias is None else bias.float() * multiplier
        if family.layer_norm:
            return LayerNorm(x, weight, bias, out, self._eps, rows)
        return RMSNorm(x, weight, out, self._eps, rows)

    def _norm_weight(self, module: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._weights.tensor(f"{module}.weight", *shape)
        return weight.float() + 1 if self._config.family.one_plus else weight

    def _head_norm(self, module: str, width: int, order: Tensor) -> Tensor:
        """The weight [width] of a norm of queries or keys, with the elements of each head in ``order``. LayerNorms of
        heads are stored as one [heads, head_dim], or each by itself."""
        dim = len(order)
        heads = width // dim
        if self._config.family.qk_norm != "layer":
            weight = self._norm_weight(module, (width,))
        elif self._weights.has(f"{module}.norms.0"):
            weight = torch.stack([self._norm_weight(f"{module}.norms.{head}", (dim,)) for head in range(heads)])
        else:
            weight = self._norm_weight(module, (heads, dim))
        return weight.view(heads, dim)[:, order].flatten()

    def _attention(
        self, i: int, layer: str, x: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[list[Op], list[Op]]:
        """The operations that compute attention, and those that add it to the residual stream."""
        config, buffers, weights = self._config, self._buffers, self._weights
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        module = f"{layer}.{config.modules.attention}"
        cosine, sine = buffers.rotations[config.rope_kinds[i]]
        rotary_dim = 2 * cosine.shape[1]
        q_norm = k_norm = None
        if norms := config.family.qk_norm:
            widths = (dim, dim) if norms == "head" else (config.q_size, config.kv_size)
            names, order = (config.modules.q_norm, config.modules.k_norm), element_order(config, rotary_dim)
            q_norm, k_norm = (self._head_norm(f"{layer}.{name}", n, order) for name, n in zip(names, widths))
        head_norms: list[Op] = []
        if norms == "layer" and q_norm is not None and k_norm is not None:
            q, k, _ = buffers.qkv.split([config.q_size, config.kv_size, config.kv_size], 1)
            head_norms = [HeadNorm(q, q_norm, dim, config.rms_norm_eps), HeadNorm(k, k_norm, dim, config.rms_norm_eps)]
            q_norm = k_norm = None
        if not config.rotated[i]:
            cosine = sine = cosine.new_empty(len(cosine), 0)
        k_scale, v_scale = cache_scales(weights.source, module, kv_heads, self._kv_dtype)
        k_center = cache_center(weights.source, module, kv_heads, dim, self._kv_dtype)
        if k_center is not None:
            k_center = k_center[:, element_order(config, rotary_dim)]
        sinks = weights.tensor(f"{layer}.{config.modules.sinks}", heads).float() if config.family.sinks else None
        sizes = [config.q_size, config.kv_size, config.kv_size]
        if len(config.modules.qkv) == 1:
            sizes = [sum(sizes)]
        orders = qkv_orders(config, rotary_dim)
        compute = [
            *self._joined(layer, config.modules.qkv, sizes, x, buffers.qkv, orders),
            *head_norms,
            RopeKV(
                buffers.qkv, cosine, sine, k_cache, v_cache, heads, kv_heads, dim,
                q_norm, k_norm, config.rms_norm_eps, k_scale, v_scale, k_center, buffers.q_scale,
            ),
            Attention(
                buffers.qkv, buffers.attended, k_cache, v_cache, heads, kv_heads, dim, config.attention_scale,
                config.windows[i], k_scale, v_scale, config.score_cap, sinks,
            ),
        ]  # fmt: skip
        return compute, self._to_stream(layer, config.modules.out, buffers.attended, config.modules.attention_out_norm)

    def _mlp(self, layer: str, x: Tensor) -> tuple[list[Op], list[Op]]:
        """The operations that compute the feed-forward, and those that add it to the residual stream."""
        buffers, modules = self._buffers, self._config.modules
        sizes = [buffers.gate_up.shape[1] // len(modules.up)] * len(modules.up)
        compute = [
            *self._joined(layer, modules.up, sizes, x, buffers.gate_up),
            Activation(buffers.gate_up, buffers.activated, self._config.activation, self._config.family.gated),
        ]
        return compute, self._to_stream(layer, modules.down, buffers.activated, modules.mlp_out_norm)

    def _experts(self, layer: str, x: Tensor) -> tuple[list[Op], list[Op]]:
        """Like ``_mlp``; each expert adds to the residual stream as soon as it is computed."""
        config, buffers, modules = self._config, self._buffers, self._config.modules
        assert config.moe is not None and buffers.moe is not None
        ops = routed(config.moe, modules, self._weights, layer, x, buffers.x, buffers.moe)
        if not config.moe.shared:
            return [], ops
        gate_up, activated, gate = buffers.moe.shared_gate_up, buffers.moe.shared_activated, buffers.moe.shared_gate
        sizes = [gate_up.shape[1] // len(modules.shared_up)] * len(modules.shared_up)
        ops += self._joined(layer, modules.shared_up, sizes, x, gate_up)
        ops.append(Activation(gate_up, activated, "silu", gated=True))
        if config.moe.shared_gate:
            weight, bias = self._weights.linear(f"{layer}.{modules.shared_gate}", 1, x.shape[1])
            ops += [Linear(x, weight, gate, bias), SigmoidMul(gate, activated)]
        return [], [*ops, *self._to_stream(layer, modules.shared_down, activated, None)]

    def _to_stream(self, layer: str, module: str, x: Tensor, norm: str | None) -> list[Op]:
        """The linear ``module`` of ``x`` is added to the residual stream, behind ``norm`` where there is one."""
        config, stream, sublayer = self._config, self._buffers.x, self._buffers.sublayer
        weight, bias = self._linear(f"{layer}.{module}", config.hidden_size, x.shape[1])
        out = stream if norm is None else sublayer
        adapters: list[Op] = []
        if self._lora is not None:
            adapters.append(self._lora.after([f"{layer}.{module}"], [config.hidden_size], x, out))
        if norm is None:
            return [Linear(x, weight, stream, bias, accumulate=True), *adapters]
        scale = self._norm_weight(f"{layer}.{norm}", (config.hidden_size,))
        return [
            Linear(x, weight, sublayer, bias),
            *adapters,
            RMSNorm(sublayer, scale, stream, config.rms_norm_eps, accumulate=True),
        ]

    def _linear(self, module: str, out: int, inp: int, order: Tensor | None = None) -> tuple[Weight, Tensor | None]:
        return self._weights.linear(module, out, inp, rows=order, transposed=self._config.modules.transposed)

    def _joined(
        self,
        layer: str,
        names: Sequence[str],
        sizes: Sequence[int],
        x: Tensor,
        out: Tensor,
        orders: Orders = (None, None, None),
    ) -> list[Op]:
        """One product for the linears ``names`` of ``layer`` (with ``sizes`` outputs) that share an input, or one
        product for each where their schemes differ; then their adapters. ``orders``: of their outputs in ``out``."""
        ops = self._products(layer, names, sizes, x, out, orders)
        if self._lora is not None:
            ops.append(self._lora.after([f"{layer}.{name}" for name in names], sizes, x, out, orders))
        return ops

    def _products(
        self, layer: str, names: Sequence[str], sizes: Sequence[int], x: Tensor, out: Tensor, orders: Orders
    ) -> list[Op]:
        loaded = [
            (*self._linear(f"{layer}.{name}", size, x.shape[1], order), size)
            for name, size, order in zip(names, sizes, orders)
        ]
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
