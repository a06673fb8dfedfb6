"""Instructions that look at other threads of a warp, or wait for those of a program (PTX ISA, 9.7.9 and 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .lanes import WARP, Mask, Operands, Run, State
from .memory import Fault
from .program import Instruction


def active(state: State, mask: Mask) -> Any:
    return np.ones(state.lanes, bool) if mask is None else mask


def _shfl(names: Operands, instruction: Instruction) -> Run:
    mode = instruction.opcode[2]
    to, _, valid = str(instruction.operands[0]).partition("|")
    value, other, clamp = (names.read(each, "b32") for each in instruction.operands[1:4])
    write = names.write(to)
    if valid:
        raise NotImplementedError(instruction.text)

    def run(state: State, mask: Mask) -> None:
        values = state.warps(np.broadcast_to(value(state), (state.lanes,)))
        by = state.warps(np.broadcast_to(other(state), (state.lanes,))).astype(np.int64)
        limit = state.warps(np.broadcast_to(clamp(state), (state.lanes,))).astype(np.int64)
        lane = np.arange(WARP)[None, :]
        segment = (limit >> 8) & 31
        last = (lane & segment) | (limit & 31 & ~segment)
        if mode == "bfly":
            source = lane ^ by
            inside = source <= last
        elif mode == "idx":
            source = (lane & segment) | (by & 31 & ~segment)
            inside = source <= last
        elif mode == "up":
            source = lane - by
            inside = source >= last
        else:
            source = lane + by
            inside = source <= last
        source = np.where(inside, source, lane)
        if mask is not None and not np.take_along_axis(state.warps(mask), source, 1)[state.warps(mask)].all():
            raise Fault(f"a value of a thread that is not there: {instruction.text}")
        write(state, np.take_along_axis(values, source, 1).reshape(-1), mask)

    return run


def _redux(names: Operands, instruction: Instruction) -> Run:
    operation, kind = instruction.opcode[2], instruction.opcode[-1]
    operate: Any = {"max": np.max, "min": np.min, "add": np.sum}[operation]
    value, write = names.read(instruction.operands[1], kind), names.write(instruction.operands[0])

    def run(state: State, mask: Mask) -> None:
        if not state.warps(active(state, mask)).all(1)[state.warps(active(state, mask)).any(1)].all():
            raise Fault(f"a part of a warp: {instruction.text}")
        values = state.warps(np.broadcast_to(value(state), (state.lanes,)))
        made = operate(values, axis=1, keepdims=True).astype(values.dtype)
        write(state, np.ascontiguousarray(np.broadcast_to(made, values.shape)).reshape(-1), mask)

    return run


def _elect(names: Operands, instruction: Instruction) -> Run:
    """The first thread of a warp that is there."""
    to, _, chosen = str(instruction.operands[0]).partition("|")
    write, elected = names.write(to), names.write(chosen)

    def run(state: State, mask: Mask) -> None:
        there = state.warps(active(state, mask))
        leader = np.argmax(there, 1)[:, None]
        made = (np.arange(WARP)[None, :] == leader) & there
        write(state, np.broadcast_to(leader, there.shape).reshape(-1).astype(np.uint32), mask)
        elected(state, made.reshape(-1), mask)

    return run


def _barrier(names: Operands, instruction: Instruction) -> Run:
    """Threads run in step, so nobody waits; but all of a program (of a warp) must be there."""
    width = WARP if instruction.opcode[1] == "warp" else 0

    def run(state: State, mask: Mask) -> None:
        if mask is None:
            return
        each = width or state.threads
        here = mask.reshape(-1, each)
        live = state.live.reshape(-1, each)
        if not (here == live)[here.any(1)].all():
            raise Fault(f"a barrier that some threads miss: {instruction.text}")

    return run


def _nothing(names: Operands, instruction: Instruction) -> Run:
    """What orders memory: here everything is in order."""
    return lambda state, mask: None


LOWER: dict[str, Callable[[Operands, Instruction], Run]] = {
    "shfl": _shfl, "redux": _redux, "elect": _elect, "bar": _barrier, "barrier": _barrier, "fence": _nothing,
    "membar": _nothing,
}  # fmt: skip
