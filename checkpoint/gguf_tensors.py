"""``stored_tensors``: where in a GGUF file each tensor of transformers' lies, and what llama.cpp did to it.

The names are those of the ``gguf`` package, which llama.cpp's converter uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from qserve.checkpoint.modules import Modules

Undo = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor of transformers' in a GGUF file.

    Attributes:
        shape: of transformers' tensor.
        names: tensors of the file, joined along their rows.
        laid: the shape in which they lie there, joined; with ``place`` that of one of those stacked.
        place: which one of those stacked in a tensor; None for the whole tensor.
        undo: what gives transformers' tensor.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    laid: tuple[int, ...]
    place: int | None = None
    undo: Undo | None = None


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


def _check(stored: Stored, shapes: Shapes) -> None:
    rows = 0
    for name in stored.names:
        if name not in shapes:
            raise CheckpointError(f"the tensor {name} is missing; fetch or convert the file again")
        rows += shapes[name][-2] if len(shapes[name]) > 1 else shapes[name][-1]
    shape = shapes[stored.names[0]]
    if stored.place is not None:
        shape = shape[1:] if stored.place < shape[0] else ()
    if len(stored.names) > 1:
        shape = (*shape[:-2], rows, *shape[-1:])
    if _squeezed(shape) != _squeezed(stored.laid):
        raise CheckpointError(
            f"the tensor {stored.names[0]} has shape {shapes[stored.names[0]]}, expected {stored.laid}"
            + ("" if stored.place is None else " for each that is stacked in it")
        )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
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
                yield f"{modules.head}.bias", Stored((config["vocab_size"],), ("output.bias",), (config["vocab_size"],))
        experts = self._family.experts
        sparse = experts.sparse(config, min(self._layers, len(self._shapes))) if experts else ()
        for i in range(self._layers):
            yield from self._attention(i)
            yield from self._experts(i) if i < len(sparse) and sparse[i] else self._mlp(i)

    def _attention(self, i: int) -> Iterator[tuple[str, Stored]]:
        modules, dim = self._modules, self._dim
        queries, keys = self._heads * dim, self._kv_heads * dim
        if self._family.norm_weight:
            for norm in (modules.attention_norm, modules.attention_out_norm, modules.mlp_norm, modules.mlp_out_norm):
                if norm is not None:
                    yield from self._norm(f"{modules.layers}.{i}.{norm}", self._file_name(norm, i))
        if self._family.qk_norm and (not self._family.qk_norm_asked or self._config["use_qk_norm"]):
            for norm, heads in ((modules.q_norm, self._heads), (modules.k_norm, self._kv_heads)):
                yield from self._head_norm(i, norm, heads)
        if len(modules.qkv) == 1:
            undo = partial(regroup, heads=self._heads, kv_heads=self._kv_heads) if modules.grouped else None
            yield from self._linear(i, modules.qkv[0], queries + 2 * keys, self._hidden, undo)
        else:
            for name, heads in zip(modules.qkv, (self._heads, self._kv_heads, 0)):
                undo = partial(unpermute, heads=heads) if self._permuted and heads else None
                yield from self._linear(i, name, (heads or self._kv_heads) * dim, self._hidden, undo)
        yield from self._linear(i, modules.out, self._hidden, queries)

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
            yield f"{layer}.{modules.score_bias}", Stored((count,), (f"{block}.exp_probs_b.bias",), (count,))
        gate, up, down = (f"{block}.ffn_{name}_exps.weight" for name in ("gate", "up", "down"))
        if modules.stacked != Modules().stacked:
            for name, stacks, rows, inp in (
                (modules.stacked[0], (gate, up), 2 * inner, hidden), (modules.stacked[1], (down,), hidden, inner),
            ):  # fmt: skip
                yield f"{layer}.{name}", Stored((count, rows, inp), stacks, (count, rows, inp))
        else:
            places = zip((*modules.expert_up, modules.expert_down), (gate, up, down))
            for name, stack in places:
                shape = (hidden, inner) if stack == down else (inner, hidden)
                if self._shapes.get(stack, (count,))[0] != count:
                    raise CheckpointError(f"the tensor {stack} holds {self._shapes[stack][0]} experts of {count}")
                for e in range(count):
                    yield f"{layer}.{modules.experts}.{e}.{name}.weight", Stored(shape, (stack,), shape, e)
        shared = int(self._config[experts.shared_inner]) if experts.shared_inner else 0
        if experts.shared_count:
            shared = inner * int(self._config[experts.shared_count])
        if shared:
            names = tuple(f"{block}.ffn_{name}_shexp.weight" for name in ("gate", "up"))
            if len(modules.shared_up) == 1:
                shape = (2 * shared, hidden)
                yield f"{layer}.{modules.shared_up[0]}.weight", Stored(shape, names, shape)
            else:
                for name, stack in zip(modules.shared_up, names):
                    yield f"{layer}.{name}.weight", Stored((shared, hidden), (stack,), (shared, hidden))
            yield from self._linear(i, modules.shared_down, hidden, shared)
            if experts.shared_gate:
                yield from self._linear(i, modules.shared_gate, 1, hidden)

    def _linear(
        self, i: int, name: str, out: int, inp: int, undo: Undo | None = None
    ) -> Iterator[tuple[str, Stored]]:
        module, stem = f"{self._modules.layers}.{i}.{name}", self._file_name(name, i)
        if self._modules.transposed:
            shape = (inp, out)
            yield f"{module}.weight", Stored(shape, (f"{stem}.weight",), (out, inp), undo=undo or _transposed)
        else:
            yield f"{module}.weight", Stored((out, inp), (f"{stem}.weight",), (out, inp), undo=undo)
        if f"{stem}.bias" in self._shapes or f"{self._file_name(name, 0)}.bias" in self._shapes:
            yield f"{module}.bias", Stored((out,), (f"{stem}.bias",), (out,), undo=undo)

    def _norm(self, module: str, stem: str) -> Iterator[tuple[str, Stored]]:
        shape = (self._hidden,)
        undo = _minus_one if self._family.one_plus else None
        yield f"{module}.weight", Stored(shape, (f"{stem}.weight",), shape, undo=undo)
        if self._family.norm_bias:
            yield f"{module}.bias", Stored(shape, (f"{stem}.bias",), shape)

    def _head_norm(self, i: int, name: str, heads: int) -> Iterator[tuple[str, Stored]]:
        module, stored = f"{self._modules.layers}.{i}.{name}", (f"{self._file_name(name, i)}.weight",)
        dim, kind = self._dim, self._family.qk_norm
        undo = _minus_one if self._family.one_plus else None
        if kind == "layer" and self._family.norm_bias:  # StableLM has a module for each head
            for head in range(heads):
                place = head if heads > 1 else None
                yield f"{module}.norms.{head}.weight", Stored((dim,), stored, (dim,), place, undo)
            return
        shape = (dim,) if kind == "head" else (heads * dim,) if kind == "all" else (heads, dim)
        yield f"{module}.weight", Stored(shape, stored, shape, undo=undo)

    def _plain(self, module: str, stem: str, *shape: int) -> tuple[str, Stored]:
        return f"{module}.weight", Stored(shape, (f"{stem}.weight",), shape)

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


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k (weight [out, in] or bias [out]).

    Its RoPE turns neighbouring rows (0, 1), (2, 3), ... of a head; Hugging Face's turns row i with i + dim/2.
    """
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def regroup(tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rows of all queries, all keys and all values, as groups: for each key head its queries, its key and its value."""
    group, dim = heads // kv_heads, tensor.shape[0] // (heads + 2 * kv_heads)
    rest = tensor.shape[1:]
    q, k, v = tensor.split([heads * dim, kv_heads * dim, kv_heads * dim])
    parts = [q.reshape(kv_heads, group * dim, *rest), *(x.reshape(kv_heads, dim, *rest) for x in (k, v))]
    return torch.cat(parts, 1).reshape(tensor.shape)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.T.contiguous() if tensor.dim() > 1 else tensor


def _minus_one(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) - 1
