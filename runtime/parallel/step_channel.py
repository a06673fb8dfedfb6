"""``StepChannel``: what the first rank tells the others to run, as plain arrays in memory that all share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.kernels import native
from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.parallel.group import RankGroup, SharedMemory

_RUN, _HEAD, _COPY = 1, 2, 3
_SHAPES = 128  # of steps whose views are kept


class StepChannel:
    """The first rank calls ``run``, ``head`` and ``copy``, the others ``follow``. An order is written when all have
    done the one before. Each of the first three raises ``RankLost`` where a rank has ended."""

    def __init__(self, memory: SharedMemory, group: RankGroup, limits: DecoderLimits, groups: int) -> None:
        """``groups``: of layers. ``limits``: of the decoders; no step has more requests than ``max_logits``."""
        self._meet = native.meeting(group.ranks)
        self._order = memory.take((8,), torch.int32).numpy()
        self._rows = memory.take((limits.max_logits,), torch.int32)
        width = -(-limits.max_positions // BLOCK_SIZE) + 1
        size = limits.max_tokens * (2 + groups) + 2 * limits.max_logits + 1 + groups * limits.max_logits * width
        self._arrays = memory.take((size,), torch.int32)
        self._copies = memory.take((2 * limits.num_blocks, 2), torch.int32)
        self._steps: dict[tuple[int, ...], tuple[Step, ...]] = {}

    def run(self, steps: Sequence[Step]) -> None:
        """Let the others run the step that follows: its form for each group of layers."""
        step = steps[0]
        shape = step.tokens, step.sequences, step.logits, step.table_stride, len(steps)
        self._meet()
        for mine, shared in zip(steps, self._views(shape)):
            for name in ("slots", "block_tables"):
                getattr(shared, name).numpy()[:] = getattr(mine, name).numpy()  # a third of the time of torch's copy
        for name in ("token_ids", "positions", "seq_start", "logit_rows"):
            getattr(shared, name).numpy()[:] = getattr(step, name).numpy()
        self._publish(_RUN, *shape)

    def head(self, rows: Tensor | None) -> None:
        """Let the others compute their part of the logits of these rows of the step; None: of its ``logit_rows``."""
        self._meet()
        if rows is not None:
            self._rows[: len(rows)] = rows
        self._publish(_HEAD, -1 if rows is None else len(rows))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Let the others copy blocks of their cache: ``(source, destination)``, in order."""
        for first in range(0, len(copies), len(self._copies)):
            some = copies[first : first + len(self._copies)]
            self._meet()
            self._copies[: len(some)] = torch.tensor(some, dtype=torch.int32)
            self._publish(_COPY, len(some))

    def wait(self) -> None:
        """Return when every rank has come here: all are loaded."""
        self._meet()

    def follow(self, decoder: Decoder) -> None:
        """Do what the first rank says, until it ends: then ``RankLost`` is raised."""
        steps: tuple[Step, ...] = ()
        while True:
            self._meet()  # done with the last order
            self._meet()  # this one is written
            order, *shape = self._order.tolist()
            if order == _RUN:
                steps = self._views(tuple(shape[:5]))
                decoder.run(*steps)
            elif order == _HEAD:
                decoder.head(steps[0], steps[0].logit_rows if shape[0] < 0 else self._rows[: shape[0]])
            else:
                for source, destination in self._copies[: shape[0]].tolist():
                    decoder.kv[:, :, destination].copy_(decoder.kv[:, :, source])

    def _publish(self, *order: int) -> None:
        self._order[: len(order)] = order
        self._meet()

    def _views(self, shape: tuple[int, ...]) -> tuple[Step, ...]:
        """A step of this shape for each group of layers, in the shared arrays. A step of one shape is one object."""
        if shape not in self._steps:
            if len(self._steps) == _SHAPES:
                self._steps.clear()
            tokens, sequences, logits, width, groups = shape
            done = 0

            def take(size: int) -> Tensor:
                nonlocal done
                done += size
                assert done <= len(self._arrays), "a step is larger than its limits"
                return self._arrays[done - size : done]

            ids, positions, starts, rows = (take(size) for size in (tokens, tokens, sequences + 1, logits))
            self._steps[shape] = tuple(
                Step(ids, positions, take(tokens), starts, take(sequences * width).view(sequences, width), rows)
                for _ in range(groups)
            )
        return self._steps[shape]
