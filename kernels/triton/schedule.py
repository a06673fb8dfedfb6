"""A step divided into the work of attention: tiles of prompts, and units of decodes.

Positions and rows only: ``staging`` decides where numbers lie on a device, ``attention`` uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qserve.kernels.executor import Step
from qserve.kernels.triton.attention import CHUNK

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Work:
    """All int32; ``table`` is where a sequence's block table begins among the step's.

    tiles    [tiles, 3]: first row, queries, table; those with the most keys first
    decodes  [decodes, 2]: row, and its first unit within its part
    parts    [parts, 2]: the number of decodes, and of their units; the memory for partial results holds one part
    units    [units, 3]: row, chunk, table; the units of a row are together and in order, from chunk 0
    """

    tiles: Numbers
    decodes: Numbers
    units: Numbers
    parts: Numbers


def is_decode(step: Step) -> bool:
    """Whether every sequence of the step has one token."""
    return len(step.token_ids) == len(step.seq_start) - 1


def divide(step: Step, queries: int, most_units: int = 1 << 30, chunk: int = CHUNK) -> Work:
    """A tile has at most ``queries`` of a sequence, a unit ``chunk`` keys. A part has at most ``most_units``, or
    the units of one decode."""
    starts, positions = step.seq_start.numpy(), step.positions.numpy()
    lengths = np.diff(starts)
    width = step.block_tables.shape[1]
    single = np.flatnonzero(lengths == 1)
    rows = starts[single]
    chunks = positions[rows] // chunk + 1
    ends = np.cumsum(chunks)
    firsts = ends - chunks
    total = int(ends[-1]) if len(ends) else 0
    part = _parts(chunks, most_units)
    counts = np.array([[np.sum(part == each), chunks[part == each].sum()] for each in range(part.max(initial=-1) + 1)])
    counts = counts.astype(np.int32).reshape(-1, 2)
    units = np.empty((total, 3), np.int32)
    units[:, 0] = np.repeat(rows, chunks)
    units[:, 1] = np.arange(total) - np.repeat(firsts, chunks)
    firsts -= np.concatenate([[0], counts[:-1, 1].cumsum()])[part] if len(counts) > 1 else 0
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
        counts,
    )


def _parts(chunks: NDArray[np.int_], most_units: int) -> NDArray[np.int_]:
    """The number of the part of each decode; ``chunks`` holds how many units each has."""
    part = np.zeros(len(chunks), np.int64)
    if chunks.sum() > most_units:
        index = used = 0
        for decode, units in enumerate(chunks.tolist()):
            if used and used + units > most_units:
                index, used = index + 1, 0
            part[decode] = index
            used += units
    return part
