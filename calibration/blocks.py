"""Walks a model one decoder block at a time and hands every linear's calibration input to a caller.

Knows the order in which layers run and which share an input; does not know how weights are rounded.

The whole calibration batch goes through a block in ONE forward. A hook in front of each linear sees all of its
input at once, gathers the statistics, lets the caller replace the weight, and the forward goes on with the new
one: later linears and blocks see quantized activations (true-sequential) without a forward per linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration import heap
from qserve.calibration.skeleton import Call, Skeleton
from qserve.calibration.stats import LayerStats
from qserve.checkpoint.errors import UsageError

# (module names that share one input, their weights float32 [out, in], statistics) -> the weights to go on with.
# Statistics are None for linears that the calibration batch never reached.
OnLinear = Callable[[list[str], list[Tensor], LayerStats | None], Sequence[Tensor]]
_DRY_TOKENS = 4


@dataclass(frozen=True)
class BlockDone:
    """One block has been walked: ``index`` of ``total``."""

    index: int
    total: int


def walk(
    skeleton: Skeleton, windows: Tensor | None, on_linear: OnLinear, *, hessian: bool = True
) -> Iterator[BlockDone]:
    """Visit the linears of every block in the order they run, yielding after each block.

    ``windows`` int64 [samples, length]; None visits without running anything (statistics are then None).
    ``hessian`` False gathers only its diagonal. One block is in memory at a time.
    """
    hidden: Tensor | None = None
    calls: list[Call] = []
    short: list[Call] = []
    if windows is not None:
        hidden, calls, short = skeleton.stem(windows, _DRY_TOKENS)
    total = len(skeleton.blocks)
    for index in range(total):
        block = skeleton.load(index)
        linears = skeleton.linears(index)
        if hidden is None:
            _replace(list(linears.items()), on_linear, None)
        else:
            groups = shared_inputs(block, linears, hidden[:1, :_DRY_TOKENS], short[index])
            hidden = _forward(block, linears, groups, hidden, calls[index], on_linear, hessian)
        skeleton.unload(index)
        heap.release()
        yield BlockDone(index, total)


@torch.no_grad()
def shared_inputs(block: nn.Module, linears: dict[str, nn.Linear], hidden: Tensor, call: Call) -> list[list[str]]:
    """Which linears are given the very same tensor, found by a forward over a few tokens.

    Modules are told apart by their input's identity (memory, layout, version), not by their names, so it works
    for any architecture. Linears that never run are absent.
    """
    seen: dict[tuple[Any, ...], list[str]] = {}
    alive: list[Tensor] = []  # while they live, no other tensor can have their address

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            inputs = args[0]
            alive.append(inputs)
            key = (inputs.data_ptr(), inputs.shape, inputs.stride(), inputs._version)
            seen.setdefault(key, []).append(name)

        return before

    handles = [linear.register_forward_pre_hook(hook(name)) for name, linear in linears.items()]
    try:
        block(hidden, *call.args, **call.kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        kind = type(block).__name__
        raise UsageError(f"{kind} cannot be run by itself on the model's input ({str(error)[:100]})") from None
    finally:
        for handle in handles:
            handle.remove()
    visited: set[str] = set()
    groups = []
    for names in seen.values():
        fresh = [name for name in dict.fromkeys(names) if name not in visited]
        visited.update(fresh)
        groups += [fresh] if fresh else []
    return groups


@torch.no_grad()
def _forward(
    block: nn.Module,
    linears: dict[str, nn.Linear],
    groups: list[list[str]],
    hidden: Tensor,
    call: Call,
    on_linear: OnLinear,
    hessian: bool,
) -> Tensor:
    """The block's output with every weight replaced as soon as its input is known."""
    waiting = {name: group for group in groups for name in group}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(linear: nn.Module, args: tuple[Any, ...]) -> None:
            if name not in waiting:
                return
            group = waiting[name]
            stats = LayerStats(args[0].shape[-1], hessian=hessian)
            stats.update(args[0])
            _replace([(member, linears[member]) for member in group], on_linear, stats)
            for member in group:
                del waiting[member]

        return before

    handles = [linear.register_forward_pre_hook(hook(name)) for name, linear in linears.items()]
    try:
        result = block(hidden, *call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    reached = {name for group in groups for name in group} - set(waiting)
    _replace([(name, linear) for name, linear in linears.items() if name not in reached], on_linear, None)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _replace(members: list[tuple[str, nn.Linear]], on_linear: OnLinear, stats: LayerStats | None) -> None:
    """Linears without statistics have no input in common either: each is handed over alone."""
    for part in [members] if stats is not None else [[member] for member in members]:
        weights = on_linear([name for name, _ in part], [linear.weight.data for _, linear in part], stats)
        for (_, linear), weight in zip(part, weights, strict=True):
            linear.weight.data = weight
