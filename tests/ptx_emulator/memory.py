"""Global memory, where a kernel may touch only the tensors it was given, and the shared memory of its programs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[Any]
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LINE = 16
"""Bytes of the widest access."""


class Fault(Exception):
    """The program does what a GPU would stop it for, or would return garbage for."""


class Region:
    """Bytes of this process from ``start`` to ``end``."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.base = start // LINE * LINE  # pages are larger: what is around the ends may be looked at
        size = -(-(end - self.base) // LINE) * LINE
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.base))

    def holds(self, at: Lanes, size: int) -> Lanes:
        return (at >= np.uint64(self.start)) & (at + np.uint64(size) <= np.uint64(self.end))


class Global:
    """``regions``: what a launch may touch."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions

    def _places(self, at: Lanes, lanes: Lanes | None, size: int) -> list[tuple[Region, Lanes | None]]:
        """Regions with the lanes of each (None: all)."""
        if np.any((at if lanes is None else at[lanes]) % np.uint64(size)):
            raise Fault(f"an access of {size} bytes that is not aligned")
        left = lanes
        found: list[tuple[Region, Lanes | None]] = []
        for region in self.regions:
            mine = region.holds(at, size)
            if left is not None:
                mine &= left
            if not mine.any():
                continue
            if left is None and mine.all():
                return [(region, None)]
            found.append((region, mine))
            left = ~mine if left is None else left & ~mine
            if not left.any():
                return found
        if left is None:
            left = np.ones(len(at), bool)
        if left.any():
            address = int(at[left][0])
            near = min(self.regions, key=lambda each: min(abs(each.start - address), abs(each.end - address)),
                       default=None)  # fmt: skip
            where = (
                "there is none"
                if near is None
                else f"the nearest has {near.end - near.start:,} bytes, it is at byte {address - near.start:,}"
            )
            raise Fault(f"{int(left.sum())} threads touch memory of no argument: {where}")
        return found

    def load(self, at: Lanes, lanes: Lanes | None, unit: int, count: int) -> Lanes:
        """[lanes, count] of ``unit`` bytes each; anything where a lane is not among ``lanes``."""
        size = unit * count
        out: Lanes | None = None
        for region, mine in self._places(at, lanes, size):
            cells = region.bytes.view(UNITS[unit]).reshape(-1, count)
            if mine is None:
                return cells[((at - np.uint64(region.base)) // np.uint64(size)).astype(np.int64)]
            if out is None:
                out = np.zeros((len(at), count), UNITS[unit])
            out[mine] = cells[((at[mine] - np.uint64(region.base)) // np.uint64(size)).astype(np.int64)]
        return np.zeros((len(at), count), UNITS[unit]) if out is None else out

    def store(self, at: Lanes, lanes: Lanes | None, values: Lanes) -> None:
        """``values`` [lanes, count]."""
        size = values.itemsize * values.shape[1]
        for region, mine in self._places(at, lanes, size):
            cells = region.bytes.view(values.dtype).reshape(-1, values.shape[1])
            where, what = (at, values) if mine is None else (at[mine], values[mine])
            cells[((where - np.uint64(region.base)) // np.uint64(size)).astype(np.int64)] = what


class Shared:
    """``size`` bytes for each of ``programs``, none of which may be read before it is written."""

    def __init__(self, programs: int, size: int) -> None:
        self.size = -(-size // LINE) * LINE
        self.bytes = np.zeros(programs * self.size, np.uint8)
        self.written = np.zeros(programs * self.size, bool)

    def _cells(self, at: Lanes, program: Lanes, size: int) -> Lanes:
        """Byte numbers, of addresses [...] with ``program`` of the same shape."""
        at = at.astype(np.int64)
        if np.any(at + size > self.size) or np.any(at < 0):
            raise Fault(f"shared memory past its end: byte {int(at.max()) + size:,} of {self.size:,}")
        if np.any(at % size):
            raise Fault(f"an access of {size} bytes of shared memory that is not aligned")
        return at + program * self.size

    def load(self, at: Lanes, program: Lanes, unit: int, count: int) -> Lanes:
        """[..., count] of ``unit`` bytes each at byte addresses [...]."""
        size = unit * count
        cells = self._cells(at, program, size) // size
        if not self.written.reshape(-1, size)[cells].all():
            raise Fault("shared memory that nothing has written is read")
        return self.bytes.view(UNITS[unit]).reshape(-1, count)[cells]

    def store(self, at: Lanes, program: Lanes, values: Lanes) -> None:
        """``values`` [..., count]."""
        size = values.itemsize * values.shape[-1]
        cells = self._cells(at, program, size) // size
        self.bytes.view(values.dtype).reshape(-1, values.shape[-1])[cells] = values
        self.written.reshape(-1, size)[cells] = True
