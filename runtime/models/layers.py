"""``LayerBuilder``: the operations of embeddings, attention, feed-forward and head, from the description of a family.

Weights are read when their operations are built, so that one layer at a time is in memory in both forms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows, take_rows
from qserve.kernels.int8 import round_to_int8
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
    PositionEmbed,
    RMSNorm,
    RopeKV,
    Rows,
    SigmoidMul,
    SoftCap,
)
from qserve.runtime.models.buffers import Buffers
from qserve.runtime.models.config import DecoderConfig, is_classifier
from qserve.runtime.models.delta_net import recurrence
from qserve.runtime.models.kv_scales import cache_center, cache_scales
from qserve.runtime.models.latent import latent_attention
from qserve.runtime.models.lora_layers import LoraLayers
from qserve.runtime.models.moe import routed
from qserve.runtime.models.row_order import Orders, element_order, gate_orders, part_of, qkv_orders
from qserve.runtime.models.weights import Weight, Weights
from qserve.runtime.parallel.group import RankGroup
from qserve.runtime.parallel.shard import Shard


class LayerBuilder:
    """Builds the operations of a model, part by part, in the order in which they run.

    Multipliers take no operation of their own. The residual stream is kept divided by the residual multiplier, so that
    a sublayer's output is added as it is. A norm undoes any factor, and its epsilon is smaller by the square of the
    multiplier. The multiplier of the logits is in the norm before them.

    Each product computes the outputs of this rank's shard and writes them into its columns of a buffer that all ranks
    share; ``RankGroup.gather`` follows. What adds to a whole row of such a buffer is done by the first rank alone.
    Where each rank has a buffer of its own, all do that, and look up whole embeddings.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        buffers: Buffers,
        kv_dtype: torch.dtype,
        lora: LoraLayers | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self._config, self._weights, self._buffers = config, weights, buffers
        self._kv_dtype, self._lora = kv_dtype, lora
        self._group = group = group or RankGroup()
        self._queries, self._keys = group.shard.heads(config.num_attention_heads, config.num_key_value_heads)
        self._hidden, self._vocab = group.shard.part(config.hidden_size), group.shard.part(config.vocab_size)
        self._looked_up = self._vocab if group.shares_memory else range(config.vocab_size)
        self._stream = _columns(buffers.x, self._hidden)
        self._eps = config.rms_norm_eps / config.multipliers.residual**2
        self._table: Weight | None = None

    def embed(self) -> list[Op]:
        config, buffers = self._config, self._buffers
        scale = config.multipliers.embedding / config.multipliers.residual
        meet = self._group.gather(buffers.x) if self._group.shares_memory else []
        ops: list[Op] = [Embed(self._embedding(), buffers.x, buffers.greedy, scale, self._looked_up.start), *meet]
        if (positions := config.modules.positions) is not None:
            if self._group.adds_rows:
                count = config.max_position_embeddings + config.modules.position_offset
                table = self._weights.tensor(f"{positions}.weight", count, config.hidden_size)
                ops.append(PositionEmbed(table, buffers.x, config.modules.position_offset))
            ops += meet
        return ops

    def layer(self, i: int, kept: Sequence[Tensor], x: Tensor | None = None) -> list[Op]:
        """``kept``: where the layer keeps keys and values, latents, or its states. ``x``: what its attention reads,
        where that is not the normed residual stream."""
        modules, layer = self._config.modules, f"{self._config.modules.layers}.{i}"
        parallel, read = self._config.parallel, list[Op]()
        if x is None:
            x, read = self._input(layer, modules.attention_norm)
        delta = self._config.delta and self._config.delta.layers[i]
        sublayer = self._delta if delta else self._latent if self._config.latent else self._attention
        attend, add = sublayer(i, layer, x, *kept)
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
        """Logits and greedy tokens. ``int8`` rounds a dense output layer. A classifier has no output layer, so nothing
        computes them."""
        if is_classifier(self._weights.source.config):
            return []
        config, buffers = self._config, self._buffers
        multiplier = config.multipliers.logits
        bias = None
        output = config.modules.head
        if self._weights.is_quantized(output) or not config.tie_word_embeddings:
            rows = part_of(config.vocab_size, self._vocab)
            weight, bias = self._weights.linear(output, config.vocab_size, config.hidden_size, rows=rows)
        else:
            weight = self._embedding()
            if self._looked_up != self._vocab:
                rows = torch.tensor(self._vocab)
                weight = weight[rows] if isinstance(weight, Tensor) else take_rows(weight, rows)
        if int8 and isinstance(weight, Tensor):
            weight = round_to_int8(weight)
        if bias is not None and multiplier != 1.0:
            bias = bias.float() * multiplier
        cap, own = config.logit_cap, _columns(buffers.logits, self._vocab)
        ops = [
            *self._last_norm(multiplier),
            Linear(buffers.states, weight, own, bias, rows="logits", whole=config.vocab_size),
            *self._group.gather(buffers.logits, self._divided(config.vocab_size), "logits"),
        ]
        if self._group.is_first:
            ops += [SoftCap(buffers.logits, cap)] if cap else []
            ops.append(Argmax(buffers.logits, buffers.greedy))
        return ops

    def _embedding(self) -> Weight:
        """The rows of the embedding that this rank looks up, read once for a tied head."""
        config = self._config
        if self._table is None:
            rows = part_of(config.vocab_size, self._looked_up)
            self._table, _ = self._weights.linear(
                config.modules.embedding, config.vocab_size, config.hidden_size, rows=rows
            )
        return self._table

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
        queries, keys, dim = self._queries, self._keys, config.head_dim
        heads, kv_heads = len(queries), len(keys)
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
            q, k, _ = buffers.qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
            q_norm = q_norm[queries.start * dim : queries.stop * dim]
            k_norm = k_norm[keys.start * dim : keys.stop * dim]
            head_norms = [HeadNorm(q, q_norm, dim, config.rms_norm_eps), HeadNorm(k, k_norm, dim, config.rms_norm_eps)]
            q_norm = k_norm = None
        elif norms == "all" and q_norm is not None and k_norm is not None and self._group.shard.size > 1:
            head_norms, q_norm, k_norm = self._norms_of_all(q_norm, k_norm), None, None
        if not config.rotated[i]:
            cosine = sine = cosine.new_empty(len(cosine), 0)
        stored = config.num_key_value_heads
        k_scale, v_scale = (
            None if scale is None else scale[keys.start : keys.stop]
            for scale in cache_scales(weights.source, module, stored, self._kv_dtype)
        )
        shift_matters = config.score_cap > 0 or config.family.sinks
        k_center = cache_center(weights.source, module, stored, dim, self._kv_dtype, shift_matters=shift_matters)
        if k_center is not None:
            k_center = k_center[keys.start : keys.stop, element_order(config, rotary_dim)]
        sinks = None
        if config.family.sinks:
            sinks = weights.tensor(f"{layer}.{config.modules.sinks}", config.num_attention_heads).float()
            sinks = sinks[queries.start : queries.stop]
        sizes = [config.q_size, config.kv_size, config.kv_size]
        if len(config.modules.qkv) == 1:
            sizes = [sum(sizes)]
        orders = qkv_orders(config, rotary_dim, queries, keys)
        gates: list[Op] = []
        if config.family.gated_heads:
            sizes[0] *= 2
            order, gate_order = gate_orders(config, queries)
            orders = [order, *orders[1:]]
            gates = self._joined(layer, config.modules.qkv[:1], sizes[:1], x, buffers.gates, [gate_order])
        attended = _columns(buffers.attended, self._attended(self._group.shard))
        compute = [
            *self._joined(layer, config.modules.qkv, sizes, x, buffers.qkv, orders),
            *gates,
            *head_norms,
            RopeKV(
                buffers.qkv, cosine, sine, k_cache, v_cache, heads, kv_heads, dim,
                q_norm, k_norm, config.rms_norm_eps, k_scale, v_scale, k_center, buffers.q_scale,
            ),
            Attention(
                buffers.qkv, attended, k_cache, v_cache, heads, kv_heads, dim, config.attention_scale,
                config.windows[i], k_scale, v_scale, config.score_cap, sinks,
            ),
            *([SigmoidMul(buffers.gates, attended)] if gates else []),
        ]  # fmt: skip
        parts = [self._attended(shard) for shard in self._group.shard.all]
        norm = config.modules.attention_out_norm
        return compute, self._to_stream(layer, config.modules.out, buffers.attended, parts, norm)

    def _norms_of_all(self, q_norm: Tensor, k_norm: Tensor) -> list[Op]:
        """Norms of all heads together, of which this rank has some: each rank writes its own for the others, norms all
        of them, and takes its own back."""
        config, group, dim = self._config, self._group, self._config.head_dim
        all_queries, all_keys, normed = self._buffers.heads
        wholes = normed.split([config.q_size, config.kv_size], 1)
        heads = [shard.heads(config.num_attention_heads, config.num_key_value_heads) for shard in group.shard.all]
        written: list[Op] = []
        gathers: list[Op] = []
        back: list[Op] = []
        begin = 0
        for place, (weight, buffer, whole) in enumerate(zip((q_norm, k_norm), (all_queries, all_keys), wholes)):
            parts = [range(each[place].start * dim, each[place].stop * dim) for each in heads]
            mine = parts[group.shard.rank]
            own, columns = self._buffers.qkv[:, begin : begin + len(mine)], slice(mine.start, mine.stop)
            begin += len(mine)
            written.append(Cast(own, buffer[:, columns]))
            gathers += group.gather(buffer, parts)
            back += [RMSNorm(buffer, weight, whole, config.rms_norm_eps), Cast(whole[:, columns], own)]
        if not group.apart:
            gathers = gathers[:1]  # whoever has come there has written both
        return [*written, *gathers, *back]

    def _latent(self, i: int, layer: str, x: Tensor, cache: Tensor) -> tuple[list[Op], list[Op]]:
        """Like ``_attention``."""
        config, buffers = self._config, self._buffers
        assert buffers.latent is not None
        rotation = buffers.rotations[config.rope_kinds[i]]
        attended = _columns(buffers.attended, self._attended(self._group.shard))
        compute = latent_attention(
            config, self._weights, layer, x, buffers.latent, attended, cache, rotation, self._joined, self._queries
        )
        parts = [self._attended(shard) for shard in self._group.shard.all]
        return compute, self._to_stream(layer, config.modules.out, buffers.attended, parts, None)

    def _attended(self, shard: Shard) -> range:
        """The columns of ``attended`` that a rank writes."""
        config = self._config
        heads, _ = shard.heads(config.num_attention_heads, config.num_key_value_heads)
        return range(heads.start * config.value_dim, heads.stop * config.value_dim)

    def _delta(self, i: int, layer: str, x: Tensor, conv: Tensor, state: Tensor) -> tuple[list[Op], list[Op]]:
        """The operations of a gated delta net, and those that add it to the residual stream."""
        config, modules, buffers = self._config.delta, self._config.modules, self._buffers.delta
        assert config is not None and buffers is not None
        shard, projected = self._group.shard, buffers.projected
        sizes, orders = config.sizes(modules), config.orders(modules, shard)
        parts = [config.own(each)[2][1] for each in shard.all]
        out, eps = _columns(buffers.out, parts[shard.rank]), self._config.rms_norm_eps
        compute = [
            *self._joined(layer, modules.delta_in, sizes, x, projected, orders),
            *recurrence(config, shard, modules, self._weights, layer, projected, out, conv, state, eps),
        ]
        return compute, self._to_stream(layer, modules.delta_out, buffers.out, parts, None)

    def _mlp(self, layer: str, x: Tensor) -> tuple[list[Op], list[Op]]:
        """The operations that compute the feed-forward, and those that add it to the residual stream."""
        buffers, modules, inner = self._buffers, self._config.modules, self._config.intermediate_size
        gated, part = self._config.family.gated, self._group.shard.part(inner)
        activated = _columns(buffers.activated, part)
        compute = [
            *self._up(layer, modules.up, 2 if gated else 1, inner, part, x, buffers.gate_up),
            Activation(buffers.gate_up, activated, self._config.activation, gated),
        ]
        parts = self._divided(inner)
        return compute, self._to_stream(layer, modules.down, buffers.activated, parts, modules.mlp_out_norm)

    def _up(
        self, layer: str, names: Sequence[str], projections: int, inner: int, part: range, x: Tensor, out: Tensor
    ) -> list[Op]:
        """The outputs ``part`` of each of ``projections`` to ``inner`` numbers, which the linears ``names`` hold."""
        held = projections // len(names)
        order = part_of(inner, part, held)
        return self._joined(layer, names, [held * inner] * len(names), x, out, [order] * len(names))

    def _experts(self, layer: str, x: Tensor) -> tuple[list[Op], list[Op]]:
        """Like ``_mlp``; each expert adds to the residual stream as soon as it is computed."""
        config, buffers, modules = self._config, self._buffers, self._config.modules
        assert config.moe is not None and buffers.moe is not None
        ops = routed(config.moe, modules, self._weights, layer, x, buffers.x, buffers.moe, self._group)
        inner = config.moe.shared
        if not inner:
            if self._group.reduces:
                ops += self._group.reduce(buffers.x)
            elif self._group.shares_memory:
                ops += self._group.gather(buffers.x)
            return [], ops
        gate_up, gate, part = buffers.moe.shared_gate_up, buffers.moe.shared_gate, self._group.shard.part(inner)
        activated = _columns(buffers.moe.shared_activated, part)
        ops += self._up(layer, modules.shared_up, 2, inner, part, x, gate_up)
        ops.append(Activation(gate_up, activated, "silu", gated=True))
        if config.moe.shared_gate:
            weight, bias = self._weights.linear(f"{layer}.{modules.shared_gate}", 1, x.shape[1])
            ops += [Linear(x, weight, gate, bias), SigmoidMul(gate, activated)]
        shared = buffers.moe.shared_activated
        return [], [*ops, *self._to_stream(layer, modules.shared_down, shared, self._divided(inner), None, begun=True)]

    def _to_stream(
        self, layer: str, module: str, x: Tensor, parts: Sequence[range], norm: str | None, *, begun: bool = False
    ) -> list[Op]:
        """The linear ``module`` of ``x`` is added to the residual stream, behind ``norm`` where there is one.
        ``parts``: the columns of x that each rank has written. ``begun``: each rank's stream has other terms already,
        where ranks reduce."""
        config, group, stream = self._config, self._group, self._buffers.x
        into = stream if norm is None else self._buffers.sublayer
        name = f"{layer}.{module}"
        if group.reduces:
            ops = self._reduced(name, x, into, parts, accumulate=begun or (norm is None and group.is_first))
        else:
            ops = self._gathered(name, x, into, parts, accumulate=norm is None)
        if norm is not None:
            if group.adds_rows:
                scale = self._norm_weight(f"{layer}.{norm}", (config.hidden_size,))
                ops.append(RMSNorm(into, scale, stream, config.rms_norm_eps, accumulate=True))
            ops += group.gather(stream) if group.shares_memory else []
        return ops

    def _gathered(
        self, module: str, x: Tensor, into: Tensor, parts: Sequence[range], *, accumulate: bool
    ) -> list[Op]:
        """Its own outputs of a product, by each rank."""
        size, width, group = self._config.hidden_size, parts[-1].stop, self._group
        weight, bias = self._linear(module, size, width, part_of(size, self._hidden))
        out = self._stream if accumulate else _columns(into, self._hidden)
        own, x = x, self._buffers.gathered.flatten()[: len(x) * width].view(-1, width) if group.apart else x
        ops = [*group.gather(x, parts, own=own), Linear(x, weight, out, bias, accumulate, whole=size)]
        if self._lora is not None:
            ops.append(self._lora.after([module], [size], x, out, (part_of(size, self._hidden),)))
        return [*ops, *group.gather(into, self._divided(size))]

    def _reduced(
        self, module: str, x: Tensor, into: Tensor, parts: Sequence[range], *, accumulate: bool
    ) -> list[Op]:
        """The terms of a product that its own inputs give, by each rank. The first one's also have what there is once:
        the bias, and the residual stream, as ``accumulate`` says."""
        group, size, width = self._group, self._config.hidden_size, parts[-1].stop
        own = parts[group.shard.rank]
        weight, bias = self._linear(module, size, width, inputs=own)
        ops: list[Op] = [Linear(x, weight, into, bias if group.is_first else None, accumulate)]
        if self._lora is not None:
            ops.append(self._lora.after([module], [size], x, into, inputs=own, width=width))
        return [*ops, *group.reduce(into)]

    def _divided(self, count: int) -> tuple[range, ...]:
        """The part of ``count`` outputs that each rank has."""
        return tuple(shard.part(count) for shard in self._group.shard.all)

    def _linear(
        self, module: str, out: int, inp: int, order: Tensor | None = None, inputs: range | None = None
    ) -> tuple[Weight, Tensor | None]:
        transposed = self._config.modules.transposed
        return self._weights.linear(module, out, inp, rows=order, inputs=inputs, transposed=transposed)

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
        product for each where their schemes differ; then their adapters. ``orders``: the outputs that ``out`` has."""
        ops = self._products(layer, names, sizes, x, out, orders)
        if self._lora is not None:
            ops.append(self._lora.after([f"{layer}.{name}" for name in names], sizes, x, out, orders))
        return ops

    def _products(
        self, layer: str, names: Sequence[str], sizes: Sequence[int], x: Tensor, out: Tensor, orders: Orders
    ) -> list[Op]:
        loaded = [
            (*self._linear(f"{layer}.{name}", size, x.shape[1], order), size if order is None else len(order))
            for name, size, order in zip(names, sizes, orders)
        ]
        dense = [w for w, _, _ in loaded if isinstance(w, Tensor)]
        packed = [w for w, _, _ in loaded if isinstance(w, QuantizedWeight)]
        bias = None
        if device := next((b.device for _, b, _ in loaded if b is not None), None):
            bias = torch.cat([torch.zeros(n, device=device) if b is None else b.float() for _, b, n in loaded])
        if len(dense) == len(loaded) and len({w.dtype for w in dense}) == 1:
            return [Linear(x, torch.cat(dense), out, bias, whole=sum(sizes))]
        if len(packed) == len(loaded):
            try:
                return [Linear(x, concat_rows(packed), out, bias, whole=sum(sizes))]
            except ValueError:
                pass  # different schemes: separate products into the columns of one buffer
        ops: list[Op] = []
        start = 0
        for (weight, own, size), whole in zip(loaded, sizes):
            ops.append(Linear(x, weight, out[:, start : start + size], own, whole=whole))
            start += size
        return ops


def _columns(buffer: Tensor, part: range) -> Tensor:
    """These columns of ``buffer``, which is the same object where they are all."""
    return buffer if len(part) == buffer.shape[1] else buffer[:, part.start : part.stop]
