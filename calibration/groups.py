"""Which linears of a block share an input, found by running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.products import exact_products
from qserve.calibration.skeleton import Call
from qserve.checkpoint.errors import UsageError


class StopForward(Exception):
    """Every linear of interest has run, so the rest of the forward is not needed."""


class Hooks:
    """``before(name, input)`` runs in front of each linear; a tensor that it returns replaces the input."""

    def __init__(self, linears: Mapping[str, nn.Module], before: Callable[[str, Tensor], Tensor | None]) -> None:
        self._linears, self._before = linears, before

    def __enter__(self) -> None:
        self._handles = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self._call(name, args[0]))
            for name, linear in self._linears.items()
        ]

    def _call(self, name: str, inputs: Tensor) -> tuple[Tensor] | None:
        with exact_products():
            replaced = self._before(name, inputs)
        return None if replaced is None else (replaced,)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@torch.no_grad()
def shared_inputs(block: nn.Module, linears: dict[str, nn.Linear], hidden: Tensor, call: Call) -> list[list[str]]:
    """Groups of linears that are given the very same tensor, found by a forward over a few tokens.

    Inputs are compared by identity (memory, layout, version), not by the names of modules, so it works for any
    architecture. Experts that none of the few tokens reached are grouped like the reached ones.
    """
    seen: dict[tuple[Any, ...], list[str]] = {}
    alive: list[Tensor] = []  # while these tensors live, no other can have their address

    def before(name: str, inputs: Tensor) -> None:
        alive.append(inputs)
        key = (inputs.data_ptr(), inputs.shape, inputs.stride(), inputs._version)
        seen.setdefault(key, []).append(name)

    try:
        with Hooks(linears, before):
            block(hidden, *call.args, **call.kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        kind = type(block).__name__
        raise UsageError(f"{kind} cannot be run by itself on the model's input ({str(error)[:100]})") from None
    visited: set[str] = set()
    groups = []
    for names in seen.values():
        fresh = [name for name in dict.fromkeys(names) if name not in visited]
        visited.update(fresh)
        groups += [fresh] if fresh else []
    return groups + _unreached(groups, [name for name in linears if name not in visited])


def _unreached(groups: list[list[str]], names: list[str]) -> list[list[str]]:
    """Groups of the linears that did not run, formed like those of their siblings with other numbers in their names."""
    roles = {role(name): index for index, group in enumerate(groups) for name in group}
    found: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parent = name.rpartition(".")[0]
        found.setdefault((parent, roles.get(role(name), -1 - len(found))), []).append(name)
    return list(found.values())


def stages(groups: list[list[str]]) -> list[list[list[str]]]:
    """Put groups that run in parallel, such as experts of one layer, in one stage: only their numbers differ."""
    found: dict[str, list[list[str]]] = {}
    for group in groups:
        found.setdefault(role(group[0]), []).append(group)
    return list(found.values())


def role(name: str) -> str:
    """``name`` without its numbers: the same for one linear of every expert, and of every block."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
