"""``TableRows``: the block tables of requests as int32 arrays, in which a request keeps its row from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tables = tuple[tuple[int, ...], ...]
"""A request's table for each group of layers."""

_SPARE = 16
"""Rows that are added beyond those needed, so that a few requests more need no new arrays."""


class TableRows:
    """``arrays`` has one array [rows, width] for each group of layers. What is behind the end of a table is arbitrary.

    A table that is the same object as before is not written again, and of one that only grew the new entries are. There
    are at most as many rows as requests in the largest step, and ``_SPARE`` more.
    """

    def __init__(self) -> None:
        self.arrays: list[NDArray[np.int32]] = []
        self._row_of: dict[str, int] = {}
        self._written: list[Tables] = []  # what each row holds
        self._unused: list[int] = []

    def place(self, request_ids: Sequence[str], tables: Sequence[Tables]) -> NDArray[np.intp]:
        """The row of each request, in which its tables now stand. ``tables``: of all requests of a step; all have as
        many groups."""
        new = [request_id for request_id in request_ids if request_id not in self._row_of]
        if new:
            self._add(new, request_ids, len(tables[0]))
        rows = [self._row_of[request_id] for request_id in request_ids]
        written = self._written
        for row, held in zip(rows, tables):
            if written[row] is not held:
                self._write(row, held)
        return np.array(rows, np.intp)

    def _add(self, new: Sequence[str], request_ids: Sequence[str], groups: int) -> None:
        """Give rows to ``new`` requests, if need be those of requests that are not in this step."""
        if len(self._unused) < len(new):
            gone = self._row_of.keys() - set(request_ids)
            self._unused += [self._row_of.pop(request_id) for request_id in gone]
        if (more := len(new) - len(self._unused)) > 0:
            first = len(self._written)
            more += _SPARE
            self._written += [((),) * groups] * more
            self._unused += range(first, first + more)
            self._reserve(groups, 0)
        for request_id in new:
            self._row_of[request_id] = self._unused.pop()

    def _reserve(self, groups: int, width: int) -> None:
        """Make room for all rows, and for tables of ``width`` entries."""
        before = self.arrays or [np.empty((0, 0), np.int32)] * groups
        width = max(width, before[0].shape[1])
        self.arrays = [np.zeros((len(self._written), width), np.int32) for _ in range(groups)]
        for array, old in zip(self.arrays, before):
            array[: old.shape[0], : old.shape[1]] = old

    def _write(self, row: int, tables: Tables) -> None:
        widest = max(map(len, tables))
        if widest > self.arrays[0].shape[1]:
            self._reserve(len(tables), 2 * widest)
        for array, before, table in zip(self.arrays, self._written[row], tables):
            kept = len(before) if table[: len(before)] == before else 0
            array[row, kept : len(table)] = table[kept:]
        self._written[row] = tables
