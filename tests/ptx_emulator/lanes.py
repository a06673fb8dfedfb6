"""All threads that run together: their registers, and how operands are read and written.

A register is an array [lanes] of unsigned integers (bool: predicates). Lanes are threads, those of a program together,
32 of them a warp; several programs run side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .memory import Global, Lanes, Shared
from .program import Parameter, Program

WARP = 32
STORED = {"pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
VIEWS: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "e4m3x2": np.uint16, "tf32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip

GARBAGE = 0x7FA5_7FA5_7FA5_7FA5
"""NaN in every type, or a large number."""
Mask = Lanes | None
"""Which lanes an instruction is for; None: all."""
Read = Callable[["State"], Any]
Run = Callable[["State", Mask], None]


def garbage(lanes: int, dtype: np.dtype[Any]) -> Lanes:
    """What a register holds that nothing has written."""
    if dtype == np.bool_:
        return np.ones(lanes, bool)
    return np.full(lanes, GARBAGE & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)


@dataclass
class State:
    """``program`` of each lane among those that run; ``special``: %tid and the like; ``parameters``: bytes by name;
    ``maps``: tensor descriptors by the name of the parameter that holds them."""

    lanes: int
    threads: int
    program: Lanes
    special: dict[str, Lanes]
    parameters: dict[str, bytes]
    maps: dict[str, Any]
    memory: Global
    shared: Shared
    registers: dict[str, Lanes] = field(default_factory=dict)
    barriers: dict[tuple[int, int], Any] = field(default_factory=dict)
    groups: list[Any] = field(default_factory=list)
    uncommitted: list[Any] = field(default_factory=list)
    live: Lanes = field(default_factory=lambda: np.zeros(0, bool))

    def write(self, name: str, kind: str, value: Any, mask: Mask) -> None:
        stored = STORED[kind]
        value = np.asarray(value)
        if value.dtype != stored:
            value = value.view(stored) if value.dtype.itemsize == np.dtype(stored).itemsize else value.astype(stored)
        if value.ndim == 0:
            value = np.full(self.lanes, value)
        if mask is None:
            self.registers[name] = value
        else:
            old = self.registers.get(name)
            self.registers[name] = np.where(mask, value, garbage(self.lanes, value.dtype) if old is None else old)

    def warps(self, values: Lanes) -> Lanes:
        """[lanes, ...] as [warps, 32, ...]."""
        return values.reshape(-1, WARP, *values.shape[1:])


ADDRESS = re.compile(r"\[\s*([%$\w#]+)\s*(?:\+\s*(-?\w+))?\s*\]")
SHARED, PARAMETERS = 0, 0x7F000000
"""Where ``global_smem`` begins; where parameters would lie, for the addresses of descriptors are taken."""


class Operands:
    """Turns what is written into what reads and writes it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.kinds = program.registers
        self.addresses: dict[str, int] = {}
        at = PARAMETERS
        for parameter in program.parameters:
            at += 128
            self.addresses[parameter.name] = at

    def kind(self, name: str) -> str:
        return {"u": "b", "s": "b", "f": "b"}.get(self.kinds[name][0], self.kinds[name][0]) + self.kinds[name][1:]

    def read(self, text: str, kind: str) -> Read:
        """As an array [lanes] of ``kind``, or a number where it is one."""
        dtype = np.dtype(VIEWS[kind])
        if text in self.kinds:

            def register(state: State) -> Any:
                held = state.registers.get(text)
                if held is None:  # the compiler may read what it does not need
                    return garbage(state.lanes, dtype)
                if held.dtype == dtype:
                    return held
                if held.dtype.itemsize == dtype.itemsize:
                    return held.view(dtype)
                return held.astype(f"u{dtype.itemsize}").view(dtype)

            return register
        if re.fullmatch(r"%(tid|ctaid|nctaid|ntid)\.[xyz]|%laneid", text):
            return lambda state: state.special[text].view(dtype)
        number = self.number(text, dtype)
        return lambda state: number

    def number(self, text: str, dtype: np.dtype[Any]) -> Any:
        if text in self.addresses:
            return dtype.type(self.addresses[text])
        if text == "global_smem":
            return dtype.type(SHARED)
        bits = int(text[2:], 16) if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text) else int(text.rstrip("U"), 0)
        if dtype == np.bool_:
            return np.bool_(bits != 0)
        return np.array(bits & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)[()]

    def write(self, name: str) -> Callable[[State, Any, Mask], None]:
        if name == "_":
            return lambda state, value, mask: None
        kind = self.kind(name)
        return lambda state, value, mask: state.write(name, kind, value, mask)

    def address(self, text: str, kind: str = "u64") -> Read:
        """Of ``[register + number]``."""
        words = ADDRESS.fullmatch(text)
        assert words is not None, text
        base = self.read(words[1], kind)
        dtype = np.dtype(VIEWS[kind])
        offset = np.array(int(words[2] or "0", 0) & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").astype(dtype)

        def address(state: State) -> Any:
            return np.broadcast_to(np.asarray(base(state) + offset), (state.lanes,))

        return address

    def parameter(self, text: str) -> Parameter:
        name = text.strip("[] ").split("+")[0].strip()
        return next(each for each in self.program.parameters if each.name == name)
