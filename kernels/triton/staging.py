"""The numbers of a step on their way to the device: packed into pinned memory, copied at once, asynchronously.

The place of everything but block tables and work depends only on the padded number of rows, so that a captured graph
finds it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.kernels.executor import Step
from qserve.kernels.triton.adapted_rows import AdaptedRows
from qserve.kernels.triton.runs import Runs
from qserve.kernels.triton.schedule import Numbers, Work, is_decode
from qserve.kernels.triton.split_decode import FIELDS

_ALIGN = 4  # int32 numbers: the 16 bytes of one access
_SMALLEST = 1 << 14


@dataclass(frozen=True)
class Batch:
    """A step on the device; int32. ``tokens`` and ``logits`` count rows with padding: padding is token 0 at position 0
    with slot -1, a decode with row -1, and a run of no tokens. The tables of work point into ``staged``. ``parts``
    holds the decodes and units of each part of the work; ``counts`` [parts] holds the units on the device. ``splits``
    are those of each window. Without attention there is no work. ``saves``, ``runs``, ``chunks`` and ``single`` are
    those of ``Runs``; without layers that keep states there are none. ``adapted_rows`` and ``adapted_tiles`` are
    those of ``AdaptedRows``, padded with tiles of slot -1; none where no row has an adapter."""

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
    splits: dict[int, Tensor]
    saves: Tensor
    runs: Tensor
    chunks: Tensor
    single: int
    adapted_rows: Tensor
    adapted_tiles: Tensor


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

    def load(
        self, step: Step, work: Work | None, tokens: int, logits: int, runs: Runs | None = None,
        adapted: AdaptedRows | None = None,
    ) -> tuple[Batch, bool]:
        """Send ``step`` to the device, padded to ``tokens`` and ``logits`` rows. Also returns whether the staged memory
        has moved, which makes remembered addresses void."""
        parts: dict[str, tuple[Numbers, int, int]] = {  # numbers, padded length, padding
            "ids": (step.token_ids.numpy()[:tokens], tokens, 0),
            "positions": (step.positions.numpy()[:tokens], tokens, 0),
            "slots": (step.slots.numpy()[:tokens], tokens, -1),
            "rows": (step.logit_rows.numpy()[:logits], logits, 0),
        }
        if adapted is not None:
            parts["adapted rows"] = adapted.order, tokens, 0
            parts["adapted tiles"] = adapted.tiles.reshape(-1), 3 * adapted.most(tokens), -1
        single = 0
        if runs is not None:
            single = tokens if is_decode(step) else runs.single
            parts["saves"] = runs.saves, tokens, -1
            parts["runs"] = runs.runs.reshape(-1), 3 * (single + len(runs.runs) - runs.single), 0
            parts["chunks"] = runs.chunks.reshape(-1), runs.chunks.size, 0
        if work is not None:
            decodes = tokens if len(work.tiles) == 0 else len(work.decodes)
            parts["counts"] = work.parts[:, 1], max(1, len(work.parts)), 0
            parts["decodes"] = work.decodes.reshape(-1), 2 * decodes, -1
            # Behind everything with a fixed place. Tiles and units know where the block tables are.
            tables = step.block_tables.numpy().reshape(-1)
            begin = sum(_aligned(length) for _, length, _ in parts.values())
            # Programs read splits wherever they are, so a step of decodes has as many as its padded size allows.
            more = tokens - len(step.token_ids[:tokens]) if is_decode(step) else 0
            pieces = [("tiles", work.tiles, 2, 0, 0), ("units", work.units, 2, 0, 0)]
            pieces += [(f"splits {window}", rows, 3, more, -1) for window, rows in work.splits.items()]
            begin += sum(_aligned(rows.size + added * rows.shape[1]) for _, rows, _, added, _ in pieces)
            for name, rows, column, added, padding in pieces:
                placed = rows.copy()
                placed[:, column : column + 1] += begin
                parts[name] = placed.reshape(-1), rows.size + added * rows.shape[1], padding
            parts["tables"] = tables, tables.size, 0
        places, end = {}, 0
        for name, (_, length, _) in parts.items():
            places[name] = end
            end += _aligned(length)
        moved = end > len(self._host)
        if self._on_gpu:
            self._host, self._other = self._other, self._host
            self._copied, self._before = self._before, self._copied
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before the last reads the same memory
        if moved:
            self._reserve(2 * end)
        host = self._host.numpy()
        for name, (numbers, length, padding) in parts.items():
            place = places[name]
            host[place : place + len(numbers)] = numbers
            host[place + len(numbers) : place + length] = padding
        if self._copied is not None:
            self._there[:end].copy_(self._host[:end], non_blocking=True)
            self._copied.record()

        def there(name: str, width: int = 0) -> Tensor:
            found = self._there[places[name] : places[name] + parts[name][1]] if name in parts else self._there[:0]
            return found.view(-1, width) if width else found

        return Batch(
            tokens, logits, there("ids"), there("positions"), there("slots"), there("rows"), self._there,
            there("counts"), there("decodes", 2), there("tiles", 3), there("units", 3),
            [] if work is None else [(decodes, units) for decodes, units in work.parts.tolist()],
            {} if work is None else {window: there(f"splits {window}", FIELDS) for window in work.splits},
            there("saves"), there("runs", 3), there("chunks", 2), single,
            there("adapted rows"), there("adapted tiles", 3),
        ), moved  # fmt: skip


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN
