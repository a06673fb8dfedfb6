"""Asynchronous copies from global to shared memory (PTX ISA, 9.7.9.25 and 9.7.9.27).

Those of threads (``cp.async``) arrive when they are waited for and not before, so that whoever reads too early reads
what nothing has written. Boxes of the copy engine arrive at once, and tell their barrier.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .lanes import Mask, Operands, Run, State
from .memory import Fault, Lanes
from .program import Instruction
from .warp import active


@dataclass
class Copy:
    """``lanes`` that copy; ``to``: shared addresses [lanes], ``values`` [lanes, bytes]."""

    lanes: Lanes
    to: Lanes
    values: Lanes


@dataclass
class Group:
    lanes: Lanes
    copies: list[Copy]


def _cp(names: Operands, instruction: Instruction) -> Run:
    if instruction.opcode[1] != "async":
        raise NotImplementedError(instruction.text)
    if instruction.opcode[2] == "bulk":
        return _box(names, instruction)
    if instruction.opcode[2] == "commit_group":
        return _commit
    if instruction.opcode[2] in ("wait_group", "wait_all"):
        newest = int(str(instruction.operands[0]), 0) if instruction.operands else 0
        return lambda state, mask: _wait(state, mask, newest)
    to, source = names.address(instruction.operands[0], "u32"), names.address(instruction.operands[1])
    size = int(str(instruction.operands[2]), 0)
    held = names.read(instruction.operands[3], "u32") if len(instruction.operands) > 3 else None

    def run(state: State, mask: Mask) -> None:
        lanes = active(state, mask)
        if held is not None:
            real = np.broadcast_to(held(state), (state.lanes,))
            if np.any((real != 0) & (real != size) & lanes):
                raise NotImplementedError(f"a part of a copy: {instruction.text}")
            reading = lanes & (real == size)
        else:
            reading = lanes
        values = np.zeros((state.lanes, size), np.uint8)
        if reading.any():
            unit, count = (4, size // 4) if size >= 4 else (size, 1)
            found = state.memory.load(source(state), None if reading.all() else reading, unit, count)
            values[reading] = np.ascontiguousarray(found).view(np.uint8).reshape(state.lanes, size)[reading]
        state.uncommitted.append(Copy(lanes, np.array(to(state)), values))

    return run


def _commit(state: State, mask: Mask) -> None:
    state.groups.append(Group(active(state, mask), state.uncommitted))
    state.uncommitted = []


def _wait(state: State, mask: Mask, newest: int) -> None:
    """Until no more than ``newest`` groups of a thread are on their way."""
    waiting = active(state, mask)
    later = np.zeros(state.lanes, np.int64)
    arrived = []
    for group in reversed(state.groups):
        ready = group.lanes & waiting & (later >= newest)
        later += group.lanes
        if ready.any():
            arrived.append((group, ready))
    for group, ready in reversed(arrived):
        for copy in group.copies:
            mine = copy.lanes & ready
            state.shared.store(copy.to[mine], state.program[mine], copy.values[mine])
            copy.lanes = copy.lanes & ~ready
        group.lanes = group.lanes & ~ready
    state.groups = [group for group in state.groups if group.lanes.any()]


@dataclass(frozen=True)
class Map:
    """A tensor descriptor: ``start`` of a tensor of ``shape`` whose rows are ``stride`` bytes apart, by boxes ``box``;
    ``swizzle``: bytes of a line whose 16-byte parts are exchanged, or 0."""

    start: int
    shape: tuple[int, int]
    stride: int
    box: tuple[int, int]
    element: int
    swizzle: int


def swizzled(at: Lanes, swizzle: int) -> Lanes:
    """Shared addresses as the matrix unit and the copy engine exchange them (PTX ISA, 5.5.7)."""
    if swizzle == 0:
        return at
    return at ^ (((at >> 7) & (swizzle // 16 - 1)) << 4)


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for (PTX ISA, 9.7.13.15)."""

    count: int
    left: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count


BOX = re.compile(r"\[\s*(%\w+)\s*,\s*\{\s*(%\w+)\s*,\s*(%\w+)\s*\}\s*\]")


def _box(names: Operands, instruction: Instruction) -> Run:
    if instruction.opcode[3:] != ("tensor", "2d", "shared", "global", "mbarrier::complete_tx::bytes"):
        raise NotImplementedError(instruction.text)
    to, barrier = names.address(instruction.operands[0], "u32"), names.address(instruction.operands[2], "u32")
    words = BOX.fullmatch(str(instruction.operands[1]))
    assert words is not None, instruction.text
    which, column, row = names.read(words[1], "u64"), names.read(words[2], "s32"), names.read(words[3], "s32")
    maps = {address: name for name, address in names.addresses.items()}

    def run(state: State, mask: Mask) -> None:
        at, place, waits = to(state), np.broadcast_to(which(state), (state.lanes,)), barrier(state)
        columns, rows = (np.broadcast_to(read(state), (state.lanes,)) for read in (column, row))
        for lane in np.flatnonzero(active(state, mask)):
            box = state.maps[maps[int(place[lane])]]
            program = int(state.program[lane])
            moved = _fetch(state, box, int(rows[lane]), int(columns[lane]), int(at[lane]), program)
            found = _found(state, program, int(waits[lane]))
            found.bytes -= moved
            found.settle()

    return run


def _fetch(state: State, box: Map, row: int, column: int, to: int, program: int) -> int:
    rows, columns = np.arange(row, row + box.box[0]), np.arange(column, column + box.box[1])
    inside = ((rows >= 0) & (rows < box.shape[0]))[:, None] & ((columns >= 0) & (columns < box.shape[1]))[None, :]
    places = box.start + rows[:, None] * box.stride + columns[None, :] * box.element
    flat, there = places.reshape(-1).astype(np.uint64), inside.reshape(-1)
    values = np.zeros((len(flat), 1), f"u{box.element}")
    if there.any():
        values = state.memory.load(np.where(there, flat, flat[there][0]), None, box.element, 1)
        values = np.where(there[:, None], values, np.zeros_like(values))
    line = box.box[1] * box.element
    if box.swizzle and line > box.swizzle:
        raise Fault(f"a box with lines of {line} bytes, which are exchanged within {box.swizzle}")
    if to % 128:
        raise Fault("a box that does not begin at 128 bytes")
    cells = to + np.arange(box.box[0])[:, None] * line + np.arange(box.box[1])[None, :] * box.element
    cells = swizzled(cells, box.swizzle).reshape(-1)
    state.shared.store(cells, np.full(len(cells), program), values)
    return len(cells) * box.element


def _found(state: State, program: int, address: int) -> Barrier:
    found: Barrier | None = state.barriers.get((program, address))
    if found is None:
        raise Fault(f"no barrier was made at {address} of shared memory")
    return found


def _mbarrier(names: Operands, instruction: Instruction) -> Run:
    operation = instruction.opcode[1]
    tests = operation == "try_wait"
    operands = instruction.operands
    place = operands[1] if tests or operation == "arrive" else operands[0]
    address = names.address(place, "u32")
    number = None if operation == "inval" or len(operands) == 0 else names.read(operands[-1], "u32")
    write = names.write(operands[0]) if tests else None
    if operation == "arrive" and instruction.opcode[2] != "expect_tx":
        raise NotImplementedError(instruction.text)

    def run(state: State, mask: Mask) -> None:
        at = address(state)
        values = None if number is None else np.broadcast_to(number(state), (state.lanes,))
        done = np.zeros(state.lanes, bool)
        for lane in np.flatnonzero(active(state, mask)):
            key = int(state.program[lane]), int(at[lane])
            if operation == "init":
                assert values is not None
                state.barriers[key] = Barrier(int(values[lane]), int(values[lane]))
            elif operation == "inval":
                _found(state, *key)
                del state.barriers[key]
            elif operation == "arrive":
                assert values is not None
                found = _found(state, *key)
                found.left -= 1
                found.bytes += int(values[lane])
                found.settle()
            else:
                assert values is not None
                done[lane] = _found(state, *key).phase & 1 != int(values[lane]) & 1
        if write is not None:
            write(state, done, mask)

    return run


LOWER: dict[str, Callable[[Operands, Instruction], Run]] = {"cp": _cp, "mbarrier": _mbarrier}
