"""A launch: programs in batches, their threads in step for as long as they go the same way.

Where they part, those furthest behind go on until all are together again; what is compiled from structured programs
meets at the next block after a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import copies, matrix, scalar, warp
from .lanes import Mask, Operands, Run, State
from .memory import Fault, Global, Region, Shared
from .program import Instruction, Program

LOWER = scalar.LOWER | warp.LOWER | copies.LOWER | matrix.LOWER
LANES = 1 << 14
"""Threads that run together: more would not be faster."""
PATIENCE = 10_000
"""Turns in a row of a block that jumps to itself."""


class Machine:
    """A kernel made ready."""

    def __init__(self, program: Program, threads: int, shared: int) -> None:
        self.program, self.threads, self.shared = program, threads, shared
        self.names = Operands(program)
        self.blocks = [[self._lower(each) for each in block] for block in program.blocks]
        self.place = ""

    def _lower(self, instruction: Instruction) -> tuple[str, Callable[..., Any], Callable[..., Any] | None, bool]:
        """What it does, to whom, and whether it may jump."""
        guard = None
        if instruction.guard is not None:
            read, wanted = self.names.read(instruction.guard[0], "pred"), instruction.guard[1]
            guard = read if wanted else lambda state: ~read(state)
        if instruction.opcode[0] == "bra":
            target = self.program.labels[str(instruction.operands[0])]
            return instruction.text, lambda state, mask: target, guard, True
        if instruction.opcode[0] in ("ret", "exit"):
            return instruction.text, lambda state, mask: len(self.program.blocks), guard, True
        lower = LOWER.get(instruction.opcode[0])
        if lower is None:
            raise NotImplementedError(instruction.text)
        run: Run = lower(self.names, instruction)
        return instruction.text, run, guard, False

    def launch(
        self, grid: tuple[int, int, int], parameters: dict[str, bytes], maps: dict[str, Any], regions: Iterable[Region]
    ) -> None:
        memory = Global(list(regions))
        count = grid[0] * grid[1] * grid[2]
        step = max(1, LANES // self.threads)
        anyhow = np.random.default_rng(0).permutation(count)  # no program may count on those before it
        for first in range(0, count, step):
            self._run(grid, anyhow[first : first + step], parameters, maps, memory)

    def _run(self, grid: tuple[int, int, int], numbers: Any, parameters: Any, maps: Any, memory: Global) -> None:
        lanes = len(numbers) * self.threads
        number = np.repeat(numbers, self.threads).astype(np.uint32)
        thread = np.tile(np.arange(self.threads, dtype=np.uint32), len(numbers))
        zero = np.zeros(lanes, np.uint32)
        special = {"%tid.x": thread, "%tid.y": zero, "%tid.z": zero, "%laneid": thread % 32}
        special |= {"%ctaid.x": number % grid[0], "%ctaid.y": number // grid[0] % grid[1],
                    "%ctaid.z": number // (grid[0] * grid[1])}  # fmt: skip
        special |= {f"%nctaid.{axis}": np.full(lanes, size, np.uint32) for axis, size in zip("xyz", grid)}
        special |= {name: value.astype(np.uint32) for name, value in special.items()}
        program = np.repeat(np.arange(len(numbers)), self.threads)
        state = State(
            lanes, self.threads, program, special, parameters, maps, memory, Shared(len(numbers), self.shared)
        )
        state.live = np.ones(lanes, bool)
        with np.errstate(all="ignore"):
            try:
                self._execute(state)
            except Fault as fault:
                raise Fault(f"{self.program.name}: {fault}, in: {self.place}") from None

    def _execute(self, state: State) -> None:
        end = len(self.blocks)
        together: int | None = 0
        at = np.zeros(0, np.int64)
        turns = 0
        while True:
            if together is not None:
                block, mask = together, None
            else:
                block = int(at.min())
                mask = at == block
                if mask.all():
                    together, mask = block, None
            if block >= end:
                return
            state.live = np.ones(state.lanes, bool) if mask is None else at < end
            target, who = self._block(state, self.blocks[block], mask)
            turns = turns + 1 if target == block else 0
            if turns > PATIENCE:
                raise Fault("threads wait for what does not come")
            if together is not None and (target is None or who is None):
                together = block + 1 if target is None else target
                continue
            if together is not None:
                at = np.full(state.lanes, block, np.int64)
                together = None
            here = np.ones(state.lanes, bool) if mask is None else mask
            at = np.where(here, block + 1, at)
            if target is not None:
                at = np.where(here if who is None else who, target, at)

    def _block(self, state: State, block: Any, mask: Mask) -> tuple[int | None, Mask]:
        """Where to go, and who goes there (None: all that are here)."""
        for text, run, guard, jumps in block:
            self.place = text
            who = mask
            if guard is not None:
                held = guard(state)
                held = np.full(state.lanes, held) if np.ndim(held) == 0 else held
                if mask is not None:
                    held = held & mask
                if not held.any():
                    continue
                who = None if mask is None and held.all() else held
            if jumps:
                return run(state, who), who
            run(state, who)
        return None, mask
