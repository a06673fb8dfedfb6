"""Experts that a checkpoint stores together, seen as linears of each expert, and linears of each expert put together.

A stack holds one projection of all experts of a layer: [experts, out, in], or [experts, in, out] where the family says
so, and its biases [experts, out] under the same name with ``_bias``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from qserve.checkpoint.families import FAMILIES
from qserve.checkpoint.modules import Modules
from qserve.checkpoint.source import ModelSource


@dataclass(frozen=True)
class _Slice:
    """Of the tensor ``stack`` the part of one expert: of its outputs the ``part``-th of ``parts`` equal ones."""

    stack: str
    expert: int
    part: int
    parts: int
    transposed: bool


class _OneByOne:
    """All of ``source``, but for stacks, in whose place are the tensors of ``slices``."""

    def __init__(self, source: ModelSource, slices: Mapping[str, _Slice]) -> None:
        self._source, self._slices = source, slices
        self._stacks = {each.stack for each in slices.values()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def names(self) -> list[str]:
        """As ``ModelSource.names``."""
        return [*(name for name in self._source.names() if name not in self._stacks), *self._slices]

    def has(self, name: str) -> bool:
        """As ``ModelSource.has``."""
        return name in self._slices or (name not in self._stacks and self._source.has(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """As ``ModelSource.shape``."""
        if (piece := self._slices.get(name)) is None:
            return self._source.shape(name)
        _, *shape = self._source.shape(piece.stack)
        out, *inp = reversed(shape) if piece.transposed else shape
        return out // piece.parts, *inp

    def nbytes(self, name: str) -> int:
        """As ``ModelSource.nbytes``."""
        if (piece := self._slices.get(name)) is None:
            return self._source.nbytes(name)
        whole = self._source.shape(piece.stack)
        return self._source.nbytes(piece.stack) * math.prod(self.shape(name)) // math.prod(whole)

    def keeps_float32(self, name: str) -> bool:
        """As ``ModelSource.keeps_float32``."""
        piece = self._slices.get(name)
        return self._source.keeps_float32(name if piece is None else piece.stack)

    def tensor(self, name: str, rows: range | None = None) -> Tensor:
        """As ``ModelSource.tensor``."""
        if (piece := self._slices.get(name)) is None:
            return self._source.tensor(name, rows)
        tensor = self._source.tensor(piece.stack, range(piece.expert, piece.expert + 1))[0]
        tensor = tensor.T if piece.transposed else tensor
        tensor = tensor.chunk(piece.parts)[piece.part]
        return (tensor if rows is None else tensor[rows.start : rows.stop]).contiguous()


def one_by_one(source: ModelSource) -> ModelSource:
    """``source``, with the stacks of dense experts as the linears of each expert."""
    modules = _modules(source)
    slices: dict[str, _Slice] = {}
    for name in source.names() if modules is not None else ():
        if modules is None or (found := _leaves(name, modules)) is None:
            continue
        owner, leaves, kind = found
        count, *_ = shape = source.shape(name)
        if len(shape) != (3 if kind == "weight" else 2) or shape[-1 if modules.stacked_transposed else 1] % len(leaves):
            continue
        transposed = modules.stacked_transposed and kind == "weight"
        for expert in range(count):
            for part, leaf in enumerate(leaves):
                slices[f"{owner}.{expert}.{leaf}.{kind}"] = _Slice(name, expert, part, len(leaves), transposed)
    return cast(ModelSource, _OneByOne(source, slices)) if slices else source


def together(source: ModelSource, names: Iterable[str]) -> dict[str, list[str]]:
    """The stacks that tensors ``names`` of single experts fill: the name of each, and its members by their experts.
    Only where both projections of a layer's experts are dense, and other programs know the family by its stacks alone.
    """
    modules = _modules(source)
    if modules is None or not modules.stacked_transposed:
        return {}
    of_layer = re.compile(rf"({re.escape(modules.layers)}\.\d+)\.{re.escape(modules.experts)}\.(\d+)\.(\w+)\.(\w+)")
    stacks = dict(zip((*modules.expert_up, modules.expert_down), modules.stacked, strict=True))
    found: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        if (match := of_layer.fullmatch(name)) is not None:
            layer, expert, leaf, kind = match.groups()
            stack = f"{layer}.{stacks[leaf]}{'_bias' if kind == 'bias' else ''}"
            found.setdefault(layer, {}).setdefault(stack, {})[int(expert)] = name
    return {
        stack: [members[expert] for expert in range(len(members))]
        for each_layer, each in found.items()
        if _complete(each, {f"{each_layer}.{stack}" for stack in stacks.values()})
        for stack, members in each.items()
    }


def _complete(layer: Mapping[str, Mapping[int, str]], needed: set[str]) -> bool:
    """Whether the stacks of a layer are all there, and each has all experts."""
    counts = {len(members) for members in layer.values()}
    every = all(members.keys() == set(range(len(members))) for members in layer.values())
    return needed <= layer.keys() and len(counts) == 1 and every


def stack(members: Iterable[str], read: Callable[[str], Tensor]) -> Tensor:
    """The tensor of a stack that ``together`` found, [experts, in, out] or a bias [experts, out]. ``read`` gives the
    tensor of a member."""
    return torch.stack([read(name).T if name.endswith(".weight") else read(name) for name in members])


def _modules(source: ModelSource) -> Modules | None:
    family = FAMILIES.get(str(source.config.get("model_type")))
    return None if family is None or family.experts is None else family.modules(source.config)


def _leaves(name: str, modules: Modules) -> tuple[str, tuple[str, ...], str] | None:
    """(the module of a layer's experts, the linears of one that the stack ``name`` holds, ``weight`` or ``bias``), or
    None for another tensor."""
    for stacked, leaves in zip(modules.stacked, (modules.expert_up, (modules.expert_down,)), strict=True):
        if not stacked.startswith(f"{modules.experts}."):
            continue  # transformers does not hold these together as it does others
        for ending, kind in (("", "weight"), ("_bias", "bias")):
            if name.endswith(f".{stacked}{ending}"):
                return f"{name[: -len(f'{stacked}{ending}')]}{modules.experts}", leaves, kind
    return None
