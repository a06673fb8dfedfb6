"""A step divided into the work of attention: tiles of prompts, and units of decodes.

Knows positions and rows; does not know where numbers lie on a device (``staging``), nor how they are used
(``attention``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qserve.kernels.ops import Step
from qserve.kernels.triton.attention import CHUNK

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Work:
    """All int32; ``table`` is where a sequence's block table begins among the step's.

    tiles    [tiles, 3]: first row, queries, table; those with the most keys first
    decodes  [decodes, 2]: row, its first unit
    units    [units, 3]: row, chunk, table; those of a row together and in order, from chunk 0
    """

    tiles: Numbers
    decodes: Numbers
    units: Numbers


def is_decode(step: Step) -> bool:
    """Whether every sequence of the step has one token."""
    return len(step.token_ids) == len(step.seq_start) - 1


def divide(step: Step, queries: int) -> Work:
    """``queries`` of a sequence make a tile at most."""
    starts, positions = step.seq_start.numpy(), step.positions.numpy()
    lengths = np.diff(starts)
    width = step.block_tables.shape[1]
    single = np.flatnonzero(lengths == 1)
    rows = starts[single]
    chunks = positions[rows] // CHUNK + 1
    ends = np.cumsum(chunks)
    firsts = ends - chunks
    total = int(ends[-1]) if len(ends) else 0
    units = np.empty((total, 3), np.int32)
    units[:, 0] = np.repeat(rows, chunks)
    units[:, 1] = np.arange(total) - np.repeat(firsts, chunks)
    units[:, 2] = np.repeat(single * width, chunks)
    tiles = [
        (row, min(queries, starts[sequence + 1] - row), sequence * width)
        for sequence in np.flatnonzero(lengths > 1)
        for row in range(starts[sequence], starts[sequence + 1], queries)
    ]
    tiles.sort(key=lambda tile: -int(positions[tile[0]]))
    return Work(
        np.array(tiles, np.int32).reshape(-1, 3),
        np.stack([rows, firsts], 1).astype(np.int32),
        units,
    )
