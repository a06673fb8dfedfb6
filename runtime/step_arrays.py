"""``StepArrays``: plans as the arrays that kernels read."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import chain

import torch

from qserve.kernels.ops import BLOCK_SIZE, Step
from qserve.runtime.request import PLACEHOLDER
from qserve.runtime.step_plan import StepPlan

_SHAPES = 128
"""Shapes of steps whose arrays are kept."""


class StepArrays:
    """Plans as the int32 arrays that the kernels read, with slots and tables for each group of layers. Steps of one
    shape share their memory: a described step is valid until the next one is described. After a step the processor's
    caches hold weights, and every call into torch is slow, so there are few.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[memoryview, tuple[Step, ...]]] = {}

    def describe(self, plan: StepPlan, newest: Mapping[str, int]) -> tuple[Step, ...]:
        """The step as each group of layers sees it. Its logit rows are those that are sampled from. ``newest``: for
        requests whose newest token the plan does not know, where that token lies among the last greedy ones."""
        ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        rows: list[int] = []
        groups: list[tuple[list[int], list[int]]] = [([], []) for _ in plan.sequences[0].block_tables]
        widest = max(len(table) for sequence in plan.sequences for table in sequence.block_tables)
        for sequence in plan.sequences:
            ids += sequence.token_ids
            if ids[-1] == PLACEHOLDER:
                ids[-1] = -1 - newest[sequence.request_id]
            span = range(sequence.start, sequence.start + len(sequence.token_ids))
            positions += span
            for (slots, tables), table in zip(groups, sequence.block_tables):
                slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
                tables += table
                tables += [0] * (widest - len(table))
            starts.append(len(ids))
            if sequence.num_sampled == 1:
                rows.append(len(ids) - 1)
            elif sequence.num_sampled:
                rows += range(len(ids) - sequence.num_sampled, len(ids))
        parts = (ids, positions, starts, rows, *chain.from_iterable(groups))
        shape = tuple(map(len, parts))
        if shape not in self._made:
            if len(self._made) == _SHAPES:
                self._made.clear()
            self._made[shape] = _arrays(shape, len(plan.sequences))
        memory, steps = self._made[shape]
        memory[:] = array("i", chain(*parts))
        return steps


def _arrays(shape: tuple[int, ...], sequences: int) -> tuple[memoryview, tuple[Step, ...]]:
    whole = torch.empty(sum(shape), dtype=torch.int32)
    token_ids, positions, seq_start, logit_rows, *groups = whole.split(list(shape))
    steps = tuple(
        Step(token_ids, positions, slots, seq_start, tables.view(sequences, -1), logit_rows)
        for slots, tables in zip(groups[::2], groups[1::2])
    )
    return whole.numpy().data, steps
