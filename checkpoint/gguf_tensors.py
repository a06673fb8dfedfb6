"""``stored_tensors``: where in a GGUF file each tensor of transformers' lies, and what llama.cpp did to it.

The names are those of the ``gguf`` package, which llama.cpp's converter uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gguf
import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import Family
from qserve.checkpoint.gguf_config import LONG, ROPE_FACTORS, SHORT, in_llamas_keys
from qserve.checkpoint.gguf_keys import Shapes
from qserve.checkpoint.gguf_reader import MAX_TENSORS
from qserve.checkpoint.gguf_undo import (
    OF_ROWS,
    half_rows,
    in_turn,
    joined_kv_b,
    joined_qkvz,
    log_of_rates,
    minus_one,
    regroup,
    transposed,
    unpermute,
    untiled,
    untiled_columns,
)
from qserve.checkpoint.modules import Modules

Undo = Callable[..., Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of transformers' in a GGUF file.

    Attributes:
        shape: of transformers' tensor.
        names: tensors of the file that it is made of.
        laid: the shape in which each of them lies there; with ``place`` that of one of those stacked.
        place: which one of those stacked in a tensor; None for the whole tensor.
        undo: what makes transformers' tensor of them. Without it they are joined along their rows.
    """

    shape: Shape
    names: tuple[str, ...]
    laid: tuple[Shape, ...]
    place: int | None = None
    undo: Undo | None = None

    @property
    def is_verbatim(self) -> bool:
        """One tensor of the file, as it lies there."""
        return self.undo is None and self.laid == (self.shape,)

    @property
    def keeps_rows(self) -> bool:
        """A matrix whose rows are rows of the file's."""
        undo = self.undo.func if isinstance(self.undo, partial) else self.undo
        wide = all(len(laid) == 2 and laid[1] == self.shape[-1] for laid in self.laid)
        return len(self.shape) == 2 and wide and (undo is None or undo in OF_ROWS)

    def made(self, parts: Sequence[Tensor]) -> Tensor:
        """transformers' tensor of the file's."""
        return self.joined([part.reshape(laid) for part, laid in zip(parts, self.laid)])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Their rows as those of transformers' tensor."""
        if self.undo is not None:
            return self.undo(*parts)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), -2)


def _one(name: str, shape: Shape, laid: Shape | None = None, place: int | None = None, undo: Undo | None = None
         ) -> Stored:
    """A tensor that is made of one of the file's, which lies there in the same ``shape`` unless ``laid`` says
    otherwise."""
    return Stored(shape, (name,), (shape if laid is None else laid,), place, undo)


def stored_tensors(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Stored]:
    """The tensors of the model of ``config`` by transformers' names. ``shapes``: of the tensors in the file.

    Raises ``CheckpointError`` for one that is missing or has another shape, and for one that no model would read.
    """
    found: dict[str, Stored] = {}
    read = {ROPE_FACTORS, LONG, SHORT}
    layout = _Layout(config, shapes)
    # It stops at the first missing tensor, so a file that claims a billion blocks is refused at once.
    for name, stored in layout.tensors():
        _check(stored, shapes)
        found[name] = stored
        read.update(stored.names)
    extra = sorted(name for name in set(shapes) - read if not layout.left_out(name))
    if extra:
        raise CheckpointError(f"the tensor {extra[0]} is unknown to the architecture {config['model_type']}")
    return found


def file_tensors(config: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Stored]:
    """Where a new file holds the tensors of the model of ``config``, by transformers' names: those that it ``has``."""
    return {name: stored for name, stored in _Layout(config, _Unwritten()).tensors() if has(name)}


class _Unwritten(dict[str, tuple[int, ...]]):
    """The shapes of a file that is yet to be written: any bias may be there, and no linear in two."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.endswith(".bias")

    def __len__(self) -> int:
        return MAX_TENSORS


def _check(stored: Stored, shapes: Shapes) -> None:
    for name, laid in zip(stored.names, stored.laid):
        if name not in shapes:
            raise CheckpointError(f"the tensor {name} is missing; fetch or convert the file again")
        shape = shapes[name]
        if stored.place is not None:
            shape = shape[1:] if stored.place < shape[0] else ()
        if _squeezed(shape) != _squeezed(laid):
            raise CheckpointError(
                f"the tensor {name} has shape {shapes[name]}, expected {laid}"
                + ("" if stored.place is None else " for each that is stacked in it")
            )


def _squeezed(shape: Shape) -> Shape:
    """Dimensions of one are left out by llama.cpp's converter."""
    return tuple(n for n in shape if n != 1)


class _Layout:
    """The tensors of a model, module by module."""

    def __init__(self, config: Mapping[str, Any], shapes: Shapes) -> None:
        self._config, family = in_llamas_keys(config)
        assert family.gguf is not None
        self._family: Family = family
        self._modules: Modules = family.modules(self._config)
        self._shapes = shapes
        self._permuted = family.gguf.permuted
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.gguf.architecture)
        self._map = gguf.get_tensor_name_map(arch, 1)
        self._hidden: int = self._config["hidden_size"]
        self._heads: int = self._config["num_attention_heads"]
        self._kv_heads: int = self._config["num_key_value_heads"]
        self._dim: int = self._config.get("head_dim") or self._hidden // self._heads
        self._layers: int = self._config["num_hidden_layers"]
        self._inside: dict[str, str] = {}

    def left_out(self, name: str) -> bool:
        """Whether ``name`` is of a block behind the model's, with which llama.cpp predicts more tokens."""
        block = name.split(".")
        return block[0] == "blk" and block[1].isdigit() and int(block[1]) >= self._layers

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        config, modules, hidden = self._config, self._modules, self._hidden
        yield self._plain(modules.embedding, "token_embd", config["vocab_size"], hidden)
        if modules.positions is not None:
            yield self._plain(modules.positions, "position_embd", config["max_position_embeddings"], hidden)
        if self._family.norm_weight:
            yield from self._norm(modules.norm, "output_norm")
        if not config["tie_word_embeddings"]:
            yield self._plain(modules.head, "output", config["vocab_size"], hidden)
            if self._family.head_bias:
                yield f"{modules.head}.bias", _one("output.bias", (config["vocab_size"],))
        experts = self._family.experts
        sparse = experts.sparse(config, min(self._layers, len(self._shapes))) if experts else ()
        for i in range(self._layers):
            yield from self._norms(i)
            if self._family.delta and self._config["layer_types"][i] == "linear_attention":
                yield from self._delta(i)
            else:
                yield from self._latent(i) if self._family.latent else self._attention(i)
            yield from self._experts(i) if i < len(sparse) and sparse[i] else self._mlp(i)

    def _norms(self, i: int) -> Iterator[tuple[str, Stored]]:
        modules = self._modules
        if self._family.norm_weight:
            for norm in (modules.attention_norm, modules.attention_out_norm, modules.mlp_norm, modules.mlp_out_norm):
                if norm is not None:
                    yield from self._norm(f"{modules.layers}.{i}.{norm}", self._file_name(norm, i))

    def _attention(self, i: int) -> Iterator[tuple[str, Stored]]:
        modules, dim = self._modules, self._dim
        queries, keys = self._heads * dim, self._kv_heads * dim
        if self._family.qk_norm and (not self._family.qk_norm_asked or self._config["use_qk_norm"]):
            for norm, heads in ((modules.q_norm, self._heads), (modules.k_norm, self._kv_heads)):
                yield from self._head_norm(i, norm, heads)
        if self._family.sinks:
            yield f"{modules.layers}.{i}.{modules.sinks}", _one(f"blk.{i}.attn_sinks.weight", (self._heads,))
        if len(modules.qkv) == 1:
            undo = partial(regroup, heads=self._heads, kv_heads=self._kv_heads) if modules.grouped else None
            yield from self._linear(i, modules.qkv[0], queries + 2 * keys, self._hidden, undo)
        else:
            for name, heads in zip(modules.qkv, (self._heads, self._kv_heads, 0)):
                undo = partial(unpermute, heads=heads) if self._permuted and heads else None
                gate = 2 if self._family.gated_heads and name == modules.qkv[0] else 1
                yield from self._linear(i, name, gate * (heads or self._kv_heads) * dim, self._hidden, undo)
        yield from self._linear(i, modules.out, self._hidden, queries)

    def _latent(self, i: int) -> Iterator[tuple[str, Stored]]:
        """Latent attention. Newer files hold the linear from the latent to keys and values in two."""
        config, modules, heads, hidden = self._config, self._modules, self._heads, self._hidden
        rank, q_rank, value = config["kv_lora_rank"], config["q_lora_rank"], config["v_head_dim"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        if q_rank:
            yield from self._linear(i, modules.q_a, q_rank, hidden)
            yield self._module_norm(i, modules.q_a_norm, q_rank)
            yield from self._linear(i, modules.q_b, heads * (nope + rope), q_rank)
        else:
            yield from self._linear(i, modules.qkv[0], heads * (nope + rope), hidden)
        yield from self._linear(i, modules.kv_a, rank + rope, hidden)
        yield self._module_norm(i, modules.kv_a_norm, rank)
        halves = (f"blk.{i}.attn_k_b.weight", f"blk.{i}.attn_v_b.weight")
        if any(half in self._shapes for half in halves):
            shape, laid = (heads * (nope + value), rank), ((heads, rank, nope), (heads, value, rank))
            yield f"{modules.layers}.{i}.{modules.kv_b}.weight", Stored(shape, halves, laid, undo=joined_kv_b)
        else:
            yield from self._linear(i, modules.kv_b, heads * (nope + value), rank)
        yield from self._linear(i, modules.out, hidden, heads * value)

    def _delta(self, i: int) -> Iterator[tuple[str, Stored]]:
        """A gated delta net. Its value heads have another order in the file where a key head has several, but not in
        Qwen3-Next's. Of that, newer files hold the linear for q, k, v and z in two."""
        config, modules, hidden = self._config, self._modules, self._hidden
        key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        keys, values = key_heads * config["linear_key_head_dim"], heads * config["linear_value_head_dim"]
        by_key_head = len(modules.delta_in) == 2
        order = {"key_heads": heads if by_key_head else key_heads, "heads": heads}

        def tiled(undo: Undo, **more: int) -> Undo | None:
            return partial(undo, **order, **more) if order["key_heads"] != heads else None

        module, convolved = f"{modules.layers}.{i}.{modules.delta}", 2 * keys + values
        halves = (f"blk.{i}.attn_qkv.weight", f"blk.{i}.attn_gate.weight")
        if not by_key_head:
            for name, size, first in zip(modules.delta_in, (convolved, values, heads, heads), (2 * keys, 0, 0, 0)):
                yield from self._linear(i, name, size, hidden, tiled(untiled, first=first))
        elif any(half in self._shapes for half in halves):
            shape, laid = (convolved + values, hidden), ((convolved, hidden), (values, hidden))
            join = partial(joined_qkvz, key_heads=key_heads, keys=keys)
            yield f"{modules.layers}.{i}.{modules.delta_in[0]}.weight", Stored(shape, halves, laid, undo=join)
        else:
            yield from self._linear(i, modules.delta_in[0], convolved + values, hidden)
        if by_key_head:
            yield from self._linear(i, modules.delta_in[1], 2 * heads, hidden)
        yield (
            f"{module}.conv1d.weight",
            _one(f"blk.{i}.ssm_conv1d.weight", (convolved, 1, config["linear_conv_kernel_dim"]),
                 undo=tiled(untiled, first=2 * keys)),
        )  # fmt: skip
        yield f"{module}.A_log", _one(f"blk.{i}.ssm_a", (heads,), undo=partial(log_of_rates, **order))
        yield f"{module}.dt_bias", _one(f"blk.{i}.ssm_dt.bias", (heads,), undo=tiled(untiled))
        yield f"{module}.norm.weight", _one(f"blk.{i}.ssm_norm.weight", (config["linear_value_head_dim"],))
        yield from self._linear(i, modules.delta_out, hidden, values, tiled(untiled_columns))

    def _mlp(self, i: int) -> Iterator[tuple[str, Stored]]:
        modules, inner = self._modules, self._config["intermediate_size"]
        joined = 2 if self._family.gated and len(modules.up) == 1 else 1
        for name in modules.up:
            yield from self._linear(i, name, joined * inner, self._hidden)
        yield from self._linear(i, modules.down, self._hidden, inner)

    def _experts(self, i: int) -> Iterator[tuple[str, Stored]]:
        modules, experts, hidden = self._modules, self._family.experts, self._hidden
        assert experts is not None
        layer, block = f"{modules.layers}.{i}", f"blk.{i}"
        count = next(int(self._config[key]) for key in experts.count if key in self._config)
        inner = int(self._config[experts.inner])
        yield from self._linear(i, modules.router, count, hidden)
        if experts.score_bias:
            yield f"{layer}.{modules.score_bias}", _one(f"{block}.exp_probs_b.bias", (count,))
        gate, up, down = (f"{block}.ffn_{name}_exps.weight" for name in ("gate", "up", "down"))
        if modules.alternating:
            yield from self._alternating_experts(i, count, inner)
        elif modules.stacked != Modules().stacked:
            for name, stacks, rows, inp in (
                (modules.stacked[0], (gate, up), inner, hidden), (modules.stacked[1], (down,), hidden, inner),
            ):  # fmt: skip
                laid = (count, rows, inp)
                yield f"{layer}.{name}", Stored((count, rows * len(stacks), inp), stacks, (laid,) * len(stacks))
        else:
            joined = f"{block}.ffn_gate_up_exps.weight"
            files = (joined, joined, down) if joined in self._shapes else (gate, up, down)
            for half, (name, stack) in enumerate(zip((*modules.expert_up, modules.expert_down), files)):
                shape = (hidden, inner) if stack == down else (inner, hidden)
                each, undo = ((2 * inner, hidden), partial(half_rows, half=half)) if stack == joined else (shape, None)
                self._check_count(stack, count)
                for e in range(count):
                    yield f"{layer}.{modules.experts}.{e}.{name}.weight", _one(stack, shape, each, e, undo)
        shared = int(self._config[experts.shared_inner]) if experts.shared_inner else 0
        if experts.shared_count:
            shared = inner * int(self._config[experts.shared_count])
        if shared:
            names = tuple(f"{block}.ffn_{name}_shexp.weight" for name in ("gate", "up"))
            if len(modules.shared_up) == 1:
                shape, each = (2 * shared, hidden), (shared, hidden)
                yield f"{layer}.{modules.shared_up[0]}.weight", Stored(shape, names, (each, each))
            else:
                for name, stack in zip(modules.shared_up, names):
                    yield f"{layer}.{name}.weight", _one(stack, (shared, hidden))
            yield from self._linear(i, modules.shared_down, hidden, shared)
            if experts.shared_gate:
                yield from self._linear(i, modules.shared_gate, 1, hidden)

    def _alternating_experts(self, i: int, count: int, inner: int) -> Iterator[tuple[str, Stored]]:
        """Experts with biases. In the file gate and up projection are two."""
        modules, hidden = self._modules, self._hidden
        for part, width in (("weight", (inner,)), ("bias", ())):
            gate, up, down = (f"blk.{i}.ffn_{name}_exps.{part}" for name in ("gate", "up", "down"))
            for stack in (gate, up, down):
                self._check_count(stack, count)
            each = (inner, hidden) if width else (inner,)
            for e in range(count):
                expert = f"{modules.layers}.{i}.{modules.experts}.{e}"
                joined = Stored((2 * inner, *each[1:]), (gate, up), (each, each), e, in_turn)
                yield f"{expert}.{modules.expert_up[0]}.{part}", joined
                yield f"{expert}.{modules.expert_down}.{part}", _one(down, (hidden, *width), place=e)

    def _check_count(self, stack: str, count: int) -> None:
        if self._shapes.get(stack, (count,))[0] != count:
            raise CheckpointError(f"the tensor {stack} holds {self._shapes[stack][0]} experts of {count}")

    def _linear(
        self, i: int, name: str, out: int, inp: int, undo: Undo | None = None
    ) -> Iterator[tuple[str, Stored]]:
        module, stem = f"{self._modules.layers}.{i}.{name}", self._file_name(name, i)
        if self._modules.transposed:
            yield f"{module}.weight", _one(f"{stem}.weight", (inp, out), (out, inp), undo=undo or transposed)
        else:
            yield f"{module}.weight", _one(f"{stem}.weight", (out, inp), undo=undo)
        if f"{stem}.bias" in self._shapes or f"{self._file_name(name, 0)}.bias" in self._shapes:
            yield f"{module}.bias", _one(f"{stem}.bias", (out,), undo=undo)

    def _norm(self, module: str, stem: str) -> Iterator[tuple[str, Stored]]:
        shape = (self._hidden,)
        undo = minus_one if self._family.one_plus else None
        yield f"{module}.weight", _one(f"{stem}.weight", shape, undo=undo)
        if self._family.norm_bias:
            yield f"{module}.bias", _one(f"{stem}.bias", shape)

    def _module_norm(self, i: int, name: str, width: int) -> tuple[str, Stored]:
        """A norm that is not of the stream."""
        return f"{self._modules.layers}.{i}.{name}.weight", _one(f"{self._file_name(name, i)}.weight", (width,))

    def _head_norm(self, i: int, name: str, heads: int) -> Iterator[tuple[str, Stored]]:
        module, stored = f"{self._modules.layers}.{i}.{name}", f"{self._file_name(name, i)}.weight"
        dim, kind = self._dim, self._family.qk_norm
        undo = minus_one if self._family.one_plus else None
        if kind == "layer" and self._family.norm_bias:  # StableLM has a module for each head
            for head in range(heads):
                place = head if heads > 1 else None
                yield f"{module}.norms.{head}.weight", _one(stored, (dim,), place=place, undo=undo)
            return
        shape = (dim,) if kind == "head" else (heads * dim,) if kind == "all" else (heads, dim)
        yield f"{module}.weight", _one(stored, shape, undo=undo)

    def _plain(self, module: str, stem: str, *shape: int) -> tuple[str, Stored]:
        return f"{module}.weight", _one(f"{stem}.weight", shape)

    def _file_name(self, name: str, layer: int) -> str:
        """llama.cpp's name of a module of a layer."""
        if name not in self._inside:
            found = self._map.get_name(f"{self._modules.layers}.0.{name}")
            if found is None:
                raise CheckpointError(
                    f"the gguf package has no name for {name} of {self._config['model_type']} models"
                )
            self._inside[name] = found.removeprefix("blk.0.")
        return f"blk.{layer}.{self._inside[name]}"
