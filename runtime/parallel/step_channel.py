"""``StepChannel``: what the first rank tells the others to run, as plain arrays in memory that all share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.kernels import native
from qserve.kernels.executor import Step
from qserve.kernels.ranks import RankLost
from qserve.runtime.models.decoder import Decoder, DecoderLimits, copy_blocks, copy_states
from qserve.runtime.parallel.group import RankGroup, SharedMemory
from qserve.runtime.parallel.step_memory import StepMemory

_RUN, _HEAD, _COPY, _COPY_STATES, _ADAPTER = 1, 2, 3, 4, 5


class StepChannel:
    """The first rank calls ``run``, ``head``, ``copy``, ``copy_states`` and ``change_adapter``, the others ``follow``.
    An order is written when all have done the one before. All but the last raise ``RankLost`` where a rank has ended.
    """

    def __init__(self, memory: SharedMemory, group: RankGroup, limits: DecoderLimits, groups: int) -> None:
        """``groups``: of layers. ``limits``: of the decoders; no step has more requests than ``max_logits``."""
        self._meet, self._group = native.meeting(group.ranks), group
        self._order = memory.take((8,), torch.int32).numpy()
        self._rows = memory.take((limits.max_logits,), torch.int32)
        self._step = StepMemory(memory, limits, groups)
        self._copies = memory.take((2 * limits.num_blocks, 2), torch.int32)

    def run(self, steps: Sequence[Step], sampled: Tensor) -> None:
        """Let the others run the step that follows: its form for each group of layers. ``sampled``: the tokens that
        its placeholders stand for (``Embed``)."""
        self._meet()
        self._publish(_RUN, *self._step.write(steps))
        self._group.share(sampled)

    def head(self, rows: Tensor | None) -> None:
        """Let the others compute their part of the logits of these rows of the step; None: of its ``logit_rows``."""
        self._meet()
        if rows is not None:
            self._rows[: len(rows)] = rows
        self._publish(_HEAD, -1 if rows is None else len(rows))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Let the others copy blocks of their cache: ``(source, destination)``, in order."""
        self._send(_COPY, copies)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Let the others copy states of sequences: ``(source, destination)``, in order."""
        self._send(_COPY_STATES, copies)

    def change_adapter(self, slot: int, number: int) -> int:
        """Let the others fill a slot with the adapter that they have read as ``number``, or empty it (-1). Returns -1:
        see ``StageChannel``."""
        self._meet()
        self._publish(_ADAPTER, slot, number)
        return -1

    def _send(self, order: int, copies: Sequence[tuple[int, int]]) -> None:
        for first in range(0, len(copies), len(self._copies)):
            some = copies[first : first + len(self._copies)]
            self._meet()
            self._copies[: len(some)] = torch.tensor(some, dtype=torch.int32)
            self._publish(order, len(some))

    def wait(self) -> None:
        """Return when every rank has come here: all are loaded."""
        self._meet()

    def require_all(self) -> None:
        """Raises ``RankLost`` where a rank has ended."""
        if self._group.ranks.lost():
            raise RankLost

    def follow(self, decoder: Decoder) -> None:
        """Do what the first rank says, until it ends: then ``RankLost`` is raised."""
        steps: tuple[Step, ...] = ()
        while True:
            self._meet()  # done with the last order
            self._meet()  # this one is written
            order, *shape = self._order.tolist()
            if order == _RUN:
                steps = self._step.read(tuple(shape[:7]))
                self._group.share(decoder.greedy)
                decoder.run(*steps)
            elif order == _HEAD:
                decoder.head(steps[0], steps[0].logit_rows if shape[0] < 0 else self._rows[: shape[0]])
            elif order == _COPY:
                copy_blocks(decoder, self._copies[: shape[0]].tolist())
            elif order == _ADAPTER:
                assert decoder.lora is not None
                decoder.lora.change(*shape[:2])
            else:
                copy_states(decoder.sequence_states, self._copies[: shape[0]].tolist())

    def _publish(self, *order: int) -> None:
        self._order[: len(order)] = order
        self._meet()
