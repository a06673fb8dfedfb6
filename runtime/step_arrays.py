"""``StepArrays``: plans as the arrays that kernels read. Knows plans and the layout of a step; does not know models."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import chain

import torch

from qserve.kernels.ops import BLOCK_SIZE, Step
from qserve.runtime.plan import StepPlan
from qserve.runtime.request import PLACEHOLDER

_SHAPES = 128
"""Shapes of steps whose arrays are kept."""


class StepArrays:
    """Plans as the int32 arrays that the kernels read. Steps of one shape share their memory: what was described is
    valid until the next one is. Behind a step the processor's caches hold weights, and every call into torch is slow.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[memoryview, Step]] = {}

    def describe(self, plan: StepPlan, newest: Mapping[str, int]) -> Step:
        """The logits wanted are those that are sampled from. ``newest``: where each request's last token lies among
        the last greedy ones, for those of which the plan knows no more."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        rows: list[int] = []
        tables: list[int] = []
        widest = max(len(sequence.block_table) for sequence in plan.sequences)
        for sequence in plan.sequences:
            ids += sequence.token_ids
            if ids[-1] == PLACEHOLDER:
                ids[-1] = -1 - newest[sequence.request_id]
            table = sequence.block_table
            span = range(sequence.start, sequence.start + len(sequence.token_ids))
            positions += span
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
            starts.append(len(ids))
            if sequence.num_sampled == 1:
                rows.append(len(ids) - 1)
            elif sequence.num_sampled:
                rows += range(len(ids) - sequence.num_sampled, len(ids))
            tables += table
            tables += [0] * (widest - len(table))
        parts = (ids, positions, slots, starts, rows, tables)
        shape = tuple(map(len, parts))
        if shape not in self._made:
            if len(self._made) == _SHAPES:
                self._made.clear()
            self._made[shape] = _arrays(shape, len(plan.sequences))
        memory, step = self._made[shape]
        memory[:] = array("i", chain(*parts))
        return step


def _arrays(shape: tuple[int, ...], sequences: int) -> tuple[memoryview, Step]:
    whole = torch.empty(sum(shape), dtype=torch.int32)
    token_ids, positions, slots, seq_start, logit_rows, tables = whole.split(list(shape))
    step = Step(token_ids, positions, slots, seq_start, tables.view(sequences, -1), logit_rows)
    return whole.numpy().data, step
