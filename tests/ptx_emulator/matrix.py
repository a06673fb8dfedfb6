"""Matrix instructions and the loads that feed them (PTX ISA, 9.7.14 and 9.7.15: fragments and descriptors).

A product is formed in float64 and rounded to float32 before it is added to what is there: whatever order numpy sums in,
a row's numbers do not depend on its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from .copies import swizzled
from .lanes import WARP, Mask, Operands, Run, State
from .memory import Fault, Lanes
from .program import Instruction
from .scalar import E4M3
from .warp import active

LANE = np.arange(WARP)
QUAD, IN_QUAD = LANE // 4, LANE % 4
BYTES = {"f16": 2, "bf16": 2, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "tf32": 4}


def numbers(words: Lanes, kind: str) -> Lanes:
    """32-bit words [..., n] as the numbers in them [..., n * 4 / bytes], in float64."""
    words = np.ascontiguousarray(words)
    if kind == "f16":
        return words.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind == "e4m3":
        return np.asarray(E4M3[words.view(np.uint8)]).astype(np.float64)
    return words.view({"s8": np.int8, "u8": np.uint8}[kind]).astype(np.float64)


def _left(words: Lanes, kind: str) -> Lanes:
    """A of 16 rows, from registers [..., 32, 4] of each warp: [..., 16, k]."""
    per = 4 // BYTES[kind]
    held = numbers(words, kind).reshape(*words.shape[:-1], 4, per)
    out = np.empty((*words.shape[:-2], 16, 8 * per), held.dtype)
    for register in range(4):
        rows = QUAD + 8 * (register % 2)
        columns = IN_QUAD[:, None] * per + np.arange(per)[None, :] + 4 * per * (register // 2)
        out[..., rows[:, None], columns] = held[..., register, :]
    return out


def _right(words: Lanes, kind: str) -> Lanes:
    """B of 8 columns, from registers [..., 32, 2]: [..., k, 8]."""
    per = 4 // BYTES[kind]
    held = numbers(words, kind).reshape(*words.shape[:-1], 2, per)
    out = np.empty((*words.shape[:-2], 8 * per, 8), held.dtype)
    for register in range(2):
        ks = IN_QUAD[:, None] * per + np.arange(per)[None, :] + 4 * per * register
        out[..., ks, QUAD[:, None]] = held[..., register, :]
    return out


def _stack(state: State, registers: list[Any]) -> Lanes:
    """[lanes, registers]."""
    return np.stack([np.broadcast_to(read(state), (state.lanes,)) for read in registers], -1)


def _sums(instruction: Instruction, kind: str) -> str:
    return "s32" if kind in ("s8", "u8") else "f32"


def _whole(state: State, mask: Mask, threads: int, text: str) -> Lanes:
    """Which warps (or groups of them) take part: all of their threads or none."""
    here = active(state, mask).reshape(-1, threads)
    if not (here.all(1) | ~here.any(1)).all():
        raise Fault(f"a part of a warp: {text}")
    return here.all(1)


def _mma(names: Operands, instruction: Instruction) -> Run:
    """Of one warp: 16 rows by 8 columns."""
    shape = re.fullmatch(r"m16n8k(\d+)", next(each for each in instruction.opcode if re.match(r"m\d+n", each)))
    kind = instruction.opcode[-2]
    if shape is None or int(shape[1]) * BYTES[kind] != 32:
        raise NotImplementedError(instruction.text)
    total = _sums(instruction, kind)
    to, a, b, c = instruction.operands
    left, right = ([names.read(each, "b32") for each in held] for held in (a, b))
    before = [names.read(each, total) for each in c]
    writes = [names.write(each) for each in to]

    def run(state: State, mask: Mask) -> None:
        _whole(state, mask, WARP, instruction.text)
        product = _left(state.warps(_stack(state, left)), kind) @ _right(state.warps(_stack(state, right)), kind)
        sums = state.warps(_stack(state, before))
        for register, write in enumerate(writes):
            rows, columns = QUAD + 8 * (register // 2), IN_QUAD * 2 + register % 2
            mine = product[:, rows, columns]
            write(state, (sums[..., register] + mine.astype(sums.dtype)).reshape(-1), mask)

    return run


def _wgmma(names: Operands, instruction: Instruction) -> Run:
    """Of four warps: 64 rows by n columns, the right side in shared memory, the left there or in registers."""
    if instruction.opcode[1] != "mma_async":
        return lambda state, mask: None  # everything is in order here
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", next(each for each in instruction.opcode if re.match(r"m64n", each)))
    assert shape is not None, instruction.text
    n, k = int(shape[1]), int(shape[2])
    kind = instruction.opcode[-1]
    total = _sums(instruction, kind)
    to, a, b, fresh, *flags = instruction.operands
    turned = [int(str(each), 0) for each in flags[2:]] if BYTES[kind] == 2 else []
    if any(int(str(each), 0) != 1 for each in flags[: 0 if total == "s32" else 2]):
        raise NotImplementedError(f"a product that is negated: {instruction.text}")
    in_registers = isinstance(a, tuple)
    left = [names.read(each, "b32") for each in a] if in_registers else [names.read(a, "u64")]
    right, keeps = names.read(b, "u64"), names.read(fresh, "pred")
    turned_right = bool(turned[-1]) if turned else False
    turned_left = bool(turned[0]) if turned and not in_registers else False
    before = [names.read(each, total) for each in to]
    writes = [names.write(each) for each in to]

    def run(state: State, mask: Mask) -> None:
        groups = np.flatnonzero(_whole(state, mask, 4 * WARP, instruction.text))
        first = groups * 4 * WARP
        program = state.program[first]
        if in_registers:
            words = _stack(state, left).reshape(-1, 4, WARP, 4)[groups]
            rows = _left(words, kind).reshape(len(groups), 64, k)
        else:
            rows = _operand(
                state, np.broadcast_to(left[0](state), (state.lanes,))[first], program, 64, k, kind, turned_left
            )
        columns = _operand(
            state, np.broadcast_to(right(state), (state.lanes,))[first], program, n, k, kind, turned_right
        )
        product = np.zeros((state.lanes // (4 * WARP), 64, n), rows.dtype)
        product[groups] = rows @ columns.transpose(0, 2, 1)
        product = product.reshape(-1, 16, n)
        kept = np.broadcast_to(keeps(state), (state.lanes,))
        for register, write in enumerate(writes):
            at_row = QUAD + 8 * (register // 2 % 2)
            at_column = register // 4 * 8 + IN_QUAD * 2 + register % 2
            mine = product[:, at_row, at_column].reshape(-1)
            if kept.any():
                old = before[register](state)
                write(state, np.where(kept, old, old.dtype.type(0)) + mine.astype(old.dtype), mask)
            else:
                write(state, mine.astype(np.int32 if total == "s32" else np.float32), mask)

    return run


SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}


@lru_cache
def _places(count: int, k: int, size: int, line: int, turned: bool) -> tuple[Lanes, Lanes, Lanes]:
    """Of element [count, k]: how many leading offsets and strides it is away, and bytes."""
    outer, inner = np.meshgrid(np.arange(count), np.arange(k), indexing="ij")
    if not turned:  # lines go along k: a product's k fits a line
        return np.zeros_like(outer), outer // 8, outer % 8 * line + inner * size
    per = line // size  # lines go along the other side; 8 of k lie together
    return outer // per, inner // 8, inner % 8 * line + outer % per * size


def _operand(state: State, descriptors: Lanes, program: Lanes, count: int, k: int, kind: str, turned: bool) -> Lanes:
    """[groups, count, k] by matrix descriptors [groups]: 8 lines of ``swizzle`` bytes lie together, along k, or along
    the other side where the operand is ``turned``."""
    size = BYTES[kind]
    descriptors = descriptors.astype(np.uint64)
    start = ((descriptors & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)
    leading = (((descriptors >> np.uint64(16)) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)
    stride = (((descriptors >> np.uint64(32)) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)
    modes = np.unique(descriptors >> np.uint64(62))
    if len(modes) != 1 or np.any((descriptors >> np.uint64(49)) & np.uint64(7)):
        raise NotImplementedError("matrix descriptors that differ, or with a base offset")
    line = SWIZZLES[int(modes[0])]
    if line == 0:
        raise NotImplementedError("a matrix descriptor without swizzle")
    across, along, within = _places(count, k, size, line, turned)
    at = across * leading[:, None, None] + along * stride[:, None, None] + within
    at = swizzled(start[:, None, None] + at, line)
    held = state.shared.load(at, np.broadcast_to(program[:, None, None], at.shape), size, 1)[..., 0]
    words = np.ascontiguousarray(held).view(np.uint32)
    return numbers(words, kind).reshape(at.shape)


def _ldmatrix(names: Operands, instruction: Instruction) -> Run:
    """8 x 8 matrices of 16-bit numbers, whose rows eight threads point to."""
    count = int(next(each for each in instruction.opcode if re.fullmatch(r"x\d", each))[1:])
    turned = "trans" in instruction.opcode
    to, source = instruction.operands
    writes, address = [names.write(each) for each in to], names.address(source, "u32")

    def run(state: State, mask: Mask) -> None:
        here = _whole(state, mask, WARP, instruction.text)
        rows = state.warps(address(state))[here][:, : 8 * count]
        program = state.warps(state.program)[here][:, : 8 * count]
        held = state.shared.load(rows, program, 4, 4)  # [warps, rows, 4 words]
        halves = np.ascontiguousarray(held).view(np.uint16).reshape(len(held), count, 8, 8)
        if turned:
            halves = halves.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(halves).view(np.uint32)  # [warps, count, 8, 4]
        for matrix, write in enumerate(writes):
            made = np.zeros((len(here), WARP), np.uint32)
            made[here] = words[:, matrix, QUAD, IN_QUAD]
            write(state, made.reshape(-1), mask)

    return run


def _stmatrix(names: Operands, instruction: Instruction) -> Run:
    count = int(next(each for each in instruction.opcode if re.fullmatch(r"x\d", each))[1:])
    turned = "trans" in instruction.opcode
    to, source = instruction.operands
    reads, address = [names.read(each, "b32") for each in source], names.address(to, "u32")

    def run(state: State, mask: Mask) -> None:
        here = _whole(state, mask, WARP, instruction.text)
        rows = state.warps(address(state))[here][:, : 8 * count]
        program = state.warps(state.program)[here][:, : 8 * count]
        words = state.warps(_stack(state, reads))[here]  # [warps, 32, count]
        placed = np.zeros((len(words), count, 8, 4), np.uint32)
        placed[:, :, QUAD, IN_QUAD] = words.transpose(0, 2, 1)
        halves = placed.view(np.uint16).reshape(len(words), count, 8, 8)
        if turned:
            halves = halves.transpose(0, 1, 3, 2)
        state.shared.store(
            rows, program, np.ascontiguousarray(halves).view(np.uint32).reshape(len(words), 8 * count, 4)
        )

    return run


LOWER: dict[str, Callable[[Operands, Instruction], Run]] = {
    "mma": _mma, "wgmma": _wgmma, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix,
}  # fmt: skip
