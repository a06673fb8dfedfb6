"""``StageChannel``: how steps travel through the stages of a pipeline, in memory that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.kernels import native
from qserve.kernels.executor import Step
from qserve.runtime.models.decoder import Decoder, DecoderLimits, copy_blocks, copy_states
from qserve.runtime.parallel.first_rank import FirstRank
from qserve.runtime.parallel.group import RankGroup, SharedMemory
from qserve.runtime.parallel.step_channel import StepChannel
from qserve.runtime.parallel.step_memory import StepMemory


@dataclass(frozen=True)
class _Slot:
    """A step on its way. ``order``: its shape, and how many blocks and states are to be copied before it, and slots
    of adapters changed: (slot, number of the adapter), see ``LoraLayers.change``."""

    step: StepMemory
    order: Tensor
    copies: Tensor
    state_copies: Tensor
    adapters: Tensor


class StageChannel:
    """The first rank of the last stage calls ``publish``, and that of every stage ``run`` for each step, in order. A
    stage waits for the one before it, and the first for the last, which publishes. As many steps are on their way as
    there are stages.

    ``busy``: for each stage the seconds in which it computed. What waits raises ``RankLost`` where a rank has ended.
    """

    def __init__(
        self, memory: SharedMemory, group: RankGroup, limits: DecoderLimits, groups: int, hidden_size: int,
        adapters: int = 0, shards: StepChannel | None = None,
    ) -> None:
        """``groups``: of layers, in the whole model. ``limits``: of the decoders. ``adapters``: slots for them.
        ``shards``: to the other ranks of this stage."""
        self._stage = stage = group.stage
        self._shards = shards
        self._meet = native.meeting(group.stages)
        self._arrive, self._wait_for_turn = native.handing_on(group.stages)
        # Each running request, and each that is admitted, may copy a block of each group. Every block of the cache may
        # go to a slot, and come back from one.
        most = 2 * (2 * limits.num_blocks + groups * limits.max_logits)
        self._slots = [
            _Slot(
                StepMemory(memory, limits, groups),
                memory.take((10,), torch.int32),
                memory.take((most, 2), torch.int32),
                # Each request that begins may copy a state, and so may each choice of another one.
                memory.take((2 * limits.max_logits, 2), torch.int32),
                memory.take((adapters, 2), torch.int32),
            )
            for _ in range(stage.size)
        ]
        shape = stage.size - 1, stage.size, limits.max_tokens, hidden_size
        self._hidden = memory.take(shape, torch.float32).numpy()  # behind each stage but the last, in each slot
        self.busy = memory.take((stage.size,), torch.float64).numpy()
        self._published = self._done = 0
        self._adapters: dict[int, int] = {}  # what the next step that is published finds in these slots

    @property
    def num_in_flight(self) -> int:
        """Steps that were published and did not reach this stage."""
        return self._published - self._done

    @staticmethod
    def hidden_bytes(size: int, limits: DecoderLimits, hidden_size: int) -> int:
        """Bytes of the hidden states that are on their way between ``size`` stages."""
        return (size - 1) * size * limits.max_tokens * hidden_size * 4

    def wait(self) -> None:
        """Return when every rank has come here: all are loaded. It is the first turn of each."""
        if self._shards is not None:
            self._shards.wait()
        self._meet()

    def change_adapter(self, slot: int, number: int) -> int:
        """Let every stage, before it runs the next step that is published, fill a slot with the adapter that it has
        read as ``number``, or empty it (-1). Returns the number of one that was to fill it and now does not, or -1."""
        before = self._adapters.get(slot, -1)
        self._adapters[slot] = number
        return before

    def publish(
        self, steps: Sequence[Step], copies: Sequence[tuple[int, int]], state_copies: Sequence[tuple[int, int]],
        decoder: Decoder | FirstRank,
    ) -> int:  # fmt: skip
        """Let all stages run this step, given in its form for each group of layers, after these copies of blocks and
        of states of sequences. Returns its number. A step that nobody waits for any more, because another one failed,
        is run first where it is in the way."""
        while self.num_in_flight >= self._stage.size:
            self.run(decoder)
        slot = self._slots[self._published % self._stage.size]
        assert len(copies) <= len(slot.copies), "a step copies more blocks than requests can need"
        assert len(state_copies) <= len(slot.state_copies), "a step copies more states than requests can need"
        adapters, self._adapters = [*self._adapters.items()], {}
        lists = (copies, slot.copies), (state_copies, slot.state_copies), (adapters, slot.adapters)
        for wanted, held in lists:
            if wanted:
                held[: len(wanted)] = torch.tensor(wanted, dtype=torch.int32)
        slot.order.numpy()[:] = *slot.step.write(steps), *(len(wanted) for wanted, _ in lists)
        self._published += 1
        self._arrive()
        return self._published - 1

    def run(self, decoder: Decoder | FirstRank) -> tuple[int, Step]:
        """Wait for the next step, and run the layers of this stage. Returns its number, and the step as its first group
        of layers sees it, valid until another one is published in its place."""
        number, stage = self._done, self._stage
        self._wait_for_turn(number + 2)
        began = time.perf_counter()
        self._done += 1
        place = number % stage.size
        slot = self._slots[place]
        *shape, copies, state_copies, adapters = slot.order.tolist()
        steps = slot.step.read(tuple(shape))
        rows = slice(0, steps[0].tokens)
        blocks, states = slot.copies[:copies].tolist(), slot.state_copies[:state_copies].tolist()
        changes = slot.adapters[:adapters].tolist()
        if self._shards is not None:
            self._shards.copy(blocks)
            self._shards.copy_states(states)
        copy_blocks(decoder, blocks)
        copy_states(decoder.sequence_states, states)
        for change in changes:
            if self._shards is not None:
                self._shards.change_adapter(*change)
            assert decoder.lora is not None
            decoder.lora.change(*change)
        x = decoder.x.numpy()
        if not stage.is_first:
            x[rows] = self._hidden[stage.rank - 1, place, rows]
        decoder.run(*steps)
        if not stage.is_last:
            self._hidden[stage.rank, place, rows] = x[rows]
        self.busy[stage.rank] += time.perf_counter() - began
        if not stage.is_last:
            self._arrive()
        return number, steps[0]

    def follow(self, decoder: Decoder | FirstRank) -> None:
        """Run what is published, until another rank ends: then ``RankLost`` is raised."""
        while True:
            self.run(decoder)
