"""``StepMemory``: a step in memory that ranks share, as plain arrays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.models.decoder import DecoderLimits
from qserve.runtime.parallel.group import SharedMemory

_SHAPES = 128  # of steps whose views are kept

Shape = tuple[int, int, int, int, int, int, int]
"""Tokens, sequences, rows of logits, blocks in a row of the tables, and groups of layers of a step; then 0 where no
layer keeps states of sequences, 1 where some do, and 2 where this step saves some; then whether tokens have adapters.
"""


class StepMemory:
    """One rank writes a step, and tells the others its shape. They read it where it lies."""

    def __init__(self, memory: SharedMemory, limits: DecoderLimits, groups: int) -> None:
        """``groups``: of layers. ``limits``: of the decoders; no step has more requests than ``max_logits``."""
        width = -(-limits.max_positions // BLOCK_SIZE) + 1
        size = limits.max_tokens * (4 + groups) + 3 * limits.max_logits + 1 + groups * limits.max_logits * width
        self._arrays = memory.take((size,), torch.int32)
        self._steps: dict[Shape, tuple[Step, ...]] = {}

    def write(self, steps: Sequence[Step]) -> Shape:
        """Its form for each group of layers."""
        step = steps[0]
        states = 0 if step.state_slots is None else 1 if step.state_saves is None else 2
        adapted = step.adapters is not None
        shape = step.tokens, step.sequences, step.logits, step.table_stride, len(steps), states, int(adapted)
        for mine, shared in zip(steps, self.read(shape)):
            for name in ("slots", "block_tables"):
                getattr(shared, name).numpy()[:] = getattr(mine, name).numpy()  # a third of the time of torch's copy
        names = ("token_ids", "positions", "seq_start", "logit_rows", "state_slots", "state_saves")
        for name in (*names[: 4 + states], *(["adapters"] if adapted else [])):
            getattr(shared, name).numpy()[:] = getattr(step, name).numpy()
        return shape

    def read(self, shape: Shape) -> tuple[Step, ...]:
        """A step of this shape for each group of layers, in the shared arrays. A step of one shape is one object."""
        if shape not in self._steps:
            if len(self._steps) == _SHAPES:
                self._steps.clear()
            tokens, sequences, logits, width, groups, states, adapted = shape
            done = 0

            def take(size: int) -> Tensor:
                nonlocal done
                done += size
                assert done <= len(self._arrays), "a step is larger than its limits"
                return self._arrays[done - size : done]

            ids, positions, starts, rows = (take(size) for size in (tokens, tokens, sequences + 1, logits))
            slots, saves = take(sequences) if states else None, take(tokens) if states == 2 else None
            adapters = take(tokens) if adapted else None
            self._steps[shape] = tuple(
                Step(ids, positions, take(tokens), starts, take(sequences * width).view(sequences, width), rows,
                     adapters=adapters, state_slots=slots, state_saves=saves)
                for _ in range(groups)
            )  # fmt: skip
        return self._steps[shape]
