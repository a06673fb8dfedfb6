"""The numbers of a step on their way to the device: packed into pinned memory, copied at once, asynchronously.

The place of everything but block tables and work depends only on the padded number of rows, so that a captured graph
finds it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.kernels.executor import Step
from qserve.kernels.triton.schedule import Numbers, Work

_ALIGN = 4  # int32 numbers: the 16 bytes of one access
_SMALLEST = 1 << 14


@dataclass(frozen=True)
class Batch:
    """A step on the device; int32. ``tokens`` and ``logits`` count rows with padding: padding is token 0 at position 0
    with slot -1, and a decode with row -1. The tables of work point into ``staged``. ``parts`` holds the decodes and
    units of each part of the work; ``counts`` [parts] holds the units on the device. Without attention there is no
    work."""

    tokens: int
    logits: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    staged: Tensor
    counts: Tensor
    decodes: Tensor
    tiles: Tensor
    units: Tensor
    parts: list[tuple[int, int]]


class Staging:
    """Memory on both sides. A staged step is valid until the next one is staged.

    On the host two buffers take turns: while the device still has to copy one, behind the step before, the other is
    written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._copied, self._before = (torch.cuda.Event() if self._on_gpu else None for _ in range(2))
        self._reserve(_SMALLEST)

    def _reserve(self, numbers: int) -> None:
        self._host, self._other = (
            torch.empty(numbers, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(2)
        )
        self._there = torch.empty_like(self._host, device=self._device) if self._on_gpu else self._host

    def load(self, step: Step, work: Work | None, tokens: int, logits: int) -> tuple[Batch, bool]:
        """Send ``step`` to the device, padded to ``tokens`` and ``logits`` rows. Also returns whether the staged memory
        has moved, which makes remembered addresses void."""
        parts: list[tuple[Numbers, int, int]] = [  # numbers, padded length, padding
            (step.token_ids.numpy()[:tokens], tokens, 0),
            (step.positions.numpy()[:tokens], tokens, 0),
            (step.slots.numpy()[:tokens], tokens, -1),
            (step.logit_rows.numpy()[:logits], logits, 0),
        ]
        if work is not None:
            decodes = tokens if len(work.tiles) == 0 else len(work.decodes)
            parts += [
                (work.parts[:, 1], max(1, len(work.parts)), 0),
                (work.decodes.reshape(-1), 2 * decodes, -1),
                (work.tiles.reshape(-1), work.tiles.size, 0),
            ]
        places = [0]
        for _, length, _ in parts:
            places.append(places[-1] + -(-length // _ALIGN) * _ALIGN)
        if work is not None:  # after everything with a fixed place
            units, tables = work.units.copy(), step.block_tables.numpy().reshape(-1)
            begin = places[-1] + -(-units.size // _ALIGN) * _ALIGN
            units[:, 2] += begin
            tiles = work.tiles.copy()
            tiles[:, 2] += begin
            parts[6] = (tiles.reshape(-1), tiles.size, 0)
            parts += [(units.reshape(-1), units.size, 0), (tables, tables.size, 0)]
            places += [begin, begin + tables.size]
        moved = places[-1] > len(self._host)
        if self._on_gpu:
            self._host, self._other = self._other, self._host
            self._copied, self._before = self._before, self._copied
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before the last reads the same memory
        if moved:
            self._reserve(2 * places[-1])
        host = self._host.numpy()
        for (numbers, length, padding), place in zip(parts, places):
            host[place : place + len(numbers)] = numbers
            host[place + len(numbers) : place + length] = padding
        if self._copied is not None:
            self._there[: places[-1]].copy_(self._host[: places[-1]], non_blocking=True)
            self._copied.record()
        views = [self._there[place : place + length] for (_, length, _), place in zip(parts, places)]
        none = self._there[:0]
        ids, positions, slots, rows, counts, decodes_, tiles_, units_ = [*views, none, none, none, none][:8]
        return Batch(
            tokens, logits, ids, positions, slots, rows, self._there, counts, decodes_.view(-1, 2), tiles_.view(-1, 3),
            units_.view(-1, 3), [] if work is None else [(decodes, units) for decodes, units in work.parts.tolist()],
        ), moved  # fmt: skip
