"""A step divided into the work of attention: tiles of prompts, and units or splits of decodes.

Positions and rows only: ``staging`` decides where numbers lie on a device, ``attention`` uses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qserve.kernels.executor import Step
from qserve.kernels.triton.attention import CHUNK
from qserve.kernels.triton.split_decode import FIELDS, Sharing

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Work:
    """All int32; ``table`` is where a sequence's block table begins among the step's.

    tiles    [tiles, 3]: first row, queries, table; those with the most keys first
    decodes  [decodes, 2]: row, and its first unit within its part
    parts    [parts, 2]: the number of decodes, and of their units; the memory for partial results holds one part
    units    [units, 3]: row, chunk, table; the units of a row are together and in order, from chunk 0
    splits   of every window [programs + decodes, 8], see ``split_decode``; instead of decodes, parts and units
    """

    tiles: Numbers
    decodes: Numbers
    units: Numbers
    parts: Numbers
    splits: dict[int, Numbers] = field(default_factory=dict)


def is_decode(step: Step) -> bool:
    """Whether every sequence of the step has one token."""
    return len(step.token_ids) == len(step.seq_start) - 1


def divide(step: Step, queries: int, most_units: int = 1 << 30, chunk: int = CHUNK) -> Work:
    """A tile has at most ``queries`` of a sequence, a unit ``chunk`` keys. A part has at most ``most_units``, or
    the units of one decode."""
    starts, positions = step.seq_start.numpy(), step.positions.numpy()
    width = step.block_tables.shape[1]
    single = np.flatnonzero(np.diff(starts) == 1)
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
    return Work(
        _tiles(step, queries),
        np.stack([rows, firsts], 1).astype(np.int32),
        units,
        counts,
    )


def share_out(step: Step, queries: int, sharing: Sharing, windows: Iterable[int]) -> Work:
    """Tiles as in ``divide``; the keys of decodes shared out evenly, for each of the ``windows`` of layers."""
    none = np.empty((0, 3), np.int32)
    splits = {window: _splits(step, sharing, window) for window in windows}
    return Work(_tiles(step, queries), none, none, none, splits)


def _splits(step: Step, sharing: Sharing, window: int) -> Numbers:
    starts, positions = step.seq_start.numpy(), step.positions.numpy()
    single = np.flatnonzero(np.diff(starts) == 1)
    rows, keys = starts[single], sharing.shape.keys
    splits = np.full((sharing.programs + len(rows) if len(rows) else 0, FIELDS), -1, np.int32)
    if len(rows) == 0:
        return splits
    ends = positions[rows] + 1
    begins = np.maximum(ends - window, 0) // keys if window else np.zeros_like(ends)  # in tiles of keys
    tiles = -(-ends // keys) - begins
    after = np.cumsum(tiles)
    total = int(after[-1])
    share = max(sharing.least, -(-total // sharing.programs))
    cuts = np.union1d(np.arange(0, total, share), after)
    at, until = cuts[:-1], cuts[1:]  # tiles of each split, counted over all decodes
    decode = np.searchsorted(after, at, side="right")
    counts = np.bincount(decode)
    place = np.arange(len(at)) - (np.cumsum(counts) - counts)[decode]
    several = np.where(counts > 1, counts, 0)
    slots = np.cumsum(several) - several
    program = at // share
    opens = np.diff(program, prepend=-1) > 0  # the first of its program
    index = np.where(opens, program, sharing.programs - 1 + np.cumsum(~opens))
    to_key = (begins - after + tiles)[decode]
    follows = np.append(np.where(opens[1:], -1, index[1:]), -1)
    splits[index] = np.stack([
        rows[decode], (at + to_key) * keys, np.minimum((until + to_key) * keys, ends[decode]),
        (single * step.block_tables.shape[1])[decode], slots[decode], place, counts[decode], follows,
    ], 1)  # fmt: skip
    return splits


def _tiles(step: Step, queries: int) -> Numbers:
    starts, positions = step.seq_start.numpy(), step.positions.numpy()
    width = step.block_tables.shape[1]
    tiles = [
        (row, min(queries, starts[sequence + 1] - row), sequence * width)
        for sequence in np.flatnonzero(np.diff(starts) > 1)
        for row in range(starts[sequence], starts[sequence + 1], queries)
    ]
    tiles.sort(key=lambda tile: -int(positions[tile[0]]))
    return np.array(tiles, np.int32).reshape(-1, 3)


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
