"""``RanksRunner``: what a runner does whose model several ranks compute, however they divide it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.runtime.models.decoder import Decoder, copy_blocks
from qserve.runtime.parallel.group import SharedMemory
from qserve.runtime.parallel.rank_orders import CopyBlock
from qserve.runtime.parallel.rank_processes import RankProcesses
from qserve.runtime.parallel.stage_channel import StageChannel
from qserve.runtime.parallel.step_channel import StepChannel
from qserve.runtime.runner import DecoderRunner, StepModel


class RanksRunner(DecoderRunner):
    """``processes`` are the other ranks, which follow ``channel``. ``slots``: see ``share_slots``. Its methods raise
    ``RankLost``, with the reason, where a rank has ended."""

    def __init__(
        self, model: StepModel, channel: StepChannel | StageChannel, processes: RankProcesses, slots: Tensor
    ) -> None:
        super().__init__(model)
        self.processes = processes
        self._all_ready, self._whole = channel.wait, slots

    def wait(self) -> None:
        """Return when every rank is loaded."""
        with self.processes.explained():
            self._all_ready()

    @property
    def block_bytes(self) -> int:
        """Of a block on all ranks."""
        return self._whole.shape[1]

    def add_slots(self, count: int) -> Tensor:
        """The slots are there already: uint8 [count, block_bytes]."""
        assert count == len(self._whole) - 1
        return self._whole[:count]

    def block(self, number: int) -> Tensor:
        """uint8 [block_bytes]: what all ranks have in a block or slot; of a block, until another one is asked for. No
        step may be running."""
        slot = number - self.decoder.kv.shape[2]
        if slot < 0:
            slot = len(self._whole) - 1
            order = CopyBlock(number, self.decoder.kv.shape[2] + slot)
            copy_blocks(self.decoder, [(number, order.destination)])
            self.processes.ask(order)
        return self._whole[slot]

    def cache_facts(self) -> dict[str, str]:
        return super().cache_facts() | {"ranks": f"{len(self.processes.pids) + 1}, {self.block_bytes} bytes of a block"}


def share_slots(memory: SharedMemory, decoder: Decoder, block_bytes: Sequence[int], rank: int, count: int) -> Tensor:
    """Slots for ``count`` KV blocks, and one more to look at a block, in memory of all ranks: uint8 [count + 1, bytes
    of a block on all of them]. ``decoder`` gets the part of its ``rank``. ``block_bytes``: of each rank."""
    kv, begin = decoder.kv, sum(block_bytes[:rank])
    whole = memory.take((count + 1, sum(block_bytes)), torch.uint8)
    own = whole[:, begin : begin + block_bytes[rank]].view(kv.dtype)
    decoder.slots = own.view(count + 1, kv.shape[0], kv.shape[1], kv.shape[3])
    return whole
