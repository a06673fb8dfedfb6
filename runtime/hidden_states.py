"""``HiddenStates``: the newest hidden states of a model for each running request, until somebody reads them.

Each request has a ring of memory. What it does not hold any more, or never saw, nobody reads: states of positions whose
keys came from the prefix cache were not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qserve.runtime.request import Request


@dataclass
class _Ring:
    """States of the positions ``start .. stop - 1`` of ``request``, those of position p in row p % length."""

    request: Request
    slot: int
    start: int = 0
    stop: int = 0


class HiddenStates:
    """Those of ``length`` positions, for each of ``requests``; a position has ``width`` numbers in float32."""

    def __init__(self, requests: int, length: int, width: int) -> None:
        # Written now: memory that never was would still look free. After a step every call into torch is slow.
        self._memory = np.full((requests * length, width), 0.0, np.float32)
        self._length = length
        self._free = [*range(requests)]
        self._rings: dict[str, _Ring] = {}  # the one written last at the end

    @staticmethod
    def bytes_of(requests: int, length: int, width: int) -> int:
        """What they take of memory."""
        return requests * length * width * torch.float32.itemsize

    def add(self, computed: Iterable[tuple[Request | None, int, int]], hidden: Sequence[Tensor]) -> None:
        """``computed``: requests (None for one that ended), the first position of each, and how many there are. Their
        rows follow each other in each of ``hidden`` [rows, …], which lie side by side in a state. What was known of the
        first position and later ones is known no longer: it may have been of wrong guesses."""
        rows: list[int] = []
        places: list[int] = []
        row = 0
        for request, start, count in computed:
            if request is not None and not request.beams:
                ring = self._ring(request)
                stop, kept = start + count, max(0, count - self._length)
                if not ring.start <= start <= ring.stop:
                    ring.start = start
                ring.start, ring.stop = max(ring.start, start + kept, stop - self._length), stop
                first = ring.slot * self._length
                rows += range(row + kept, row + count)
                places += [first + position % self._length for position in range(start + kept, stop)]
            row += count
        if rows:
            at = 0
            for part in hidden:
                width = part.shape[1]
                self._memory[places, at : at + width] = part.numpy()[rows]
                at += width

    def known(self, request: Request) -> range:
        """The positions whose states are there."""
        ring = self._rings.get(request.request_id)
        return range(ring.start, ring.stop) if ring is not None and ring.request is request else range(0)

    def of(self, request: Request, start: int, stop: int) -> Tensor:
        """float32 [stop - start, width] of ``known`` positions, a copy."""
        first = self._rings[request.request_id].slot * self._length
        return torch.from_numpy(self._memory[first + np.arange(start, stop) % self._length])

    def _ring(self, request: Request) -> _Ring:
        ring = self._rings.pop(request.request_id, None)
        if ring is None or ring.request is not request:
            if ring is None and not self._free:
                ring = self._rings.pop(next(iter(self._rings)))
            ring = _Ring(request, self._free.pop() if ring is None else ring.slot)
        self._rings[request.request_id] = ring
        return ring
