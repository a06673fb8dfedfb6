"""The rows of a step that have adapters, sorted by adapter: tiles of rows that are multiplied by the same matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qserve.kernels.executor import Step
from qserve.kernels.triton.grouped import most_tiles
from qserve.kernels.triton.schedule import Numbers


@dataclass(frozen=True)
class AdaptedRows:
    """All int32.

    order  [rows]: rows of the step, those of an adapter side by side, in their order
    tiles  [tiles, 3]: slot of the adapter, first place in ``order``, rows: at most ``block`` each
    """

    order: Numbers
    tiles: Numbers
    slots: int
    block: int

    def most(self, tokens: int) -> int:
        """The most tiles that a step of ``tokens`` has, whatever its adapters."""
        return most_tiles(tokens, self.slots, self.block)


def adapted_rows(step: Step, slots: int, block: int) -> AdaptedRows | None:
    """Those of ``step``, or None where it has none. ``slots``: how many there are."""
    if step.adapters is None:
        return None
    adapters = step.adapters.numpy()
    order = np.argsort(adapters, kind="stable")[int((adapters < 0).sum()) :].astype(np.int32)
    held, firsts, counts = np.unique(adapters[order], return_index=True, return_counts=True)
    tiles = [
        (slot, first + begin, min(block, count - begin))
        for slot, first, count in zip(held.tolist(), firsts.tolist(), counts.tolist())
        for begin in range(0, count, block)
    ]
    return AdaptedRows(order, np.array(tiles, np.int32).reshape(-1, 3), slots, block)
