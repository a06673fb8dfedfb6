"""``StepArrays``: plans as the arrays that kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.request import PLACEHOLDER
from qserve.runtime.step_plan import StepPlan
from qserve.runtime.table_rows import TableRows

_SHAPES = 128
"""Shapes of steps whose arrays are kept."""


class StepArrays:
    """Plans as the int32 arrays that the kernels read, with slots and tables for each group of layers. Steps of one
    shape share their memory: a described step is valid until the next one is described. After a step the processor's
    caches hold weights, and every call into torch is slow, so there are none here but for a new shape.
    """

    def __init__(self) -> None:
        self._tables = TableRows()
        self._made: dict[tuple[int, ...], tuple[tuple[Step, ...], list[list[NDArray[np.int32]]]]] = {}

    def describe(self, plan: StepPlan, newest: Mapping[str, int]) -> tuple[Step, ...]:
        """The step as each group of layers sees it. Its logit rows are those that are sampled from. ``newest``: for
        requests whose newest token the plan does not know, where that token lies among the last greedy ones."""
        columns: Any = zip(*plan.sequences)
        request_ids, runs, starts, tables, num_sampled, *_, adapters, states, saves = columns
        rows = self._tables.place(request_ids, tables)
        lengths = [*map(len, runs)]
        tokens, logits, sequences = sum(lengths), sum(num_sampled), len(runs)
        widest = max([len(table) for held in tables for table in held])
        steps, arrays = self._arrays(tokens, sequences, logits, widest, len(self._tables.arrays))
        token_ids, positions, _, seq_start, _, logit_rows = arrays[0]
        ids, ends = [*chain.from_iterable(runs)], [*accumulate(lengths)]
        if PLACEHOLDER in ids:
            for request_id, end in zip(request_ids, ends):
                if ids[end - 1] == PLACEHOLDER:
                    ids[end - 1] = -1 - newest[request_id]
        token_ids[:] = ids
        seq_start[0], seq_start[1:] = 0, ends
        if tokens == logits == sequences:  # decodes alone
            positions[:], logit_rows[:], row_of_token = starts, range(tokens), rows
        else:
            positions[:] = np.arange(tokens) + np.repeat(np.array(starts) - seq_start[:-1], lengths)
            logit_rows[:] = np.arange(logits) + np.repeat(seq_start[1:] - np.cumsum(num_sampled), num_sampled)
            row_of_token = np.repeat(rows, lengths)
        blocks, offsets = positions // BLOCK_SIZE, positions % BLOCK_SIZE
        for source, (_, _, slots, _, block_tables, _) in zip(self._tables.arrays, arrays):
            block_tables[:] = source[rows, :widest]
            slots[:] = source[row_of_token, blocks] * BLOCK_SIZE + offsets
        more = {}
        if max(adapters) >= 0:
            more["adapters"] = torch.from_numpy(np.repeat(np.array(adapters, np.int32), lengths))
        if states[0] >= 0:
            more["state_slots"] = torch.from_numpy(np.array(states, np.int32))
        if any(saves):
            state_saves = np.full(tokens, -1, np.int32)
            for begin, start, each in zip(seq_start, starts, saves):
                for behind, slot in each:
                    state_saves[begin + behind - start - 1] = slot
            more["state_saves"] = torch.from_numpy(state_saves)
        return tuple([replace(step, **more) for step in steps]) if more else steps

    def _arrays(
        self, tokens: int, sequences: int, logits: int, widest: int, groups: int
    ) -> tuple[tuple[Step, ...], list[list[NDArray[np.int32]]]]:
        """A step of this shape for each group, and its fields as arrays."""
        shape = tokens, sequences, logits, widest, groups
        if shape not in self._made:
            if len(self._made) == _SHAPES:
                self._made.clear()
            shared = [torch.empty(length, dtype=torch.int32) for length in (tokens, tokens, sequences + 1, logits)]
            token_ids, positions, seq_start, logit_rows = shared
            fields = [
                (token_ids, positions, torch.empty_like(positions), seq_start,
                 torch.empty(sequences, widest, dtype=torch.int32), logit_rows)
                for _ in range(groups)
            ]  # fmt: skip
            views = [[field.numpy() for field in each] for each in fields]
            self._made[shape] = tuple(Step(*each) for each in fields), views
        return self._made[shape]
