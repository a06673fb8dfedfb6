"""``Ranks``: the processes that share a model, and how they wait for each other."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from qserve.checkpoint.errors import QServeError

LINE = 16
"""int32 of a rank in ``Ranks.counters``: a line of the processor's caches, so that no rank writes into another's."""


class RankLost(QServeError):
    """Another rank has ended, so nothing can be computed any more."""

    def __init__(self, message: str = "another rank has ended") -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Ranks:
    """``rank`` of ``size``. ``counters``, int32 [size + 1, ``LINE``], is memory that all ranks share: how often each
    has arrived, and how many sleep until it does. The first of the last line is not 0 once a rank has ended."""

    counters: Tensor
    rank: int
    size: int

    @classmethod
    def counters_of(cls, size: int) -> tuple[int, int]:
        """The shape of ``counters``."""
        return size + 1, LINE

    def meet(self) -> None:
        """Return when all ranks have called it: the reference of ``native.meeting``. Raises ``RankLost``."""
        self.arrive()
        for rank in range(self.size):
            self.wait_for(rank, int(self.counters[self.rank, 0]))

    def arrive(self) -> None:
        """Count one more arrival of this rank."""
        self.counters[self.rank, 0] += 1

    def wait_for(self, rank: int, turn: int) -> None:
        """Return when ``rank`` has arrived ``turn`` times. Raises ``RankLost``. Both count modulo 2^32."""
        wanted = torch.tensor(turn).int()
        while self.counters[rank, 0] - wanted < 0:
            if self.lost():
                raise RankLost
            time.sleep(0)

    def lost(self) -> bool:
        """Whether one of them has ended."""
        return bool(self.counters[self.size, 0])

    def give_up(self) -> None:
        """A rank has ended: those that wait for it need not any more."""
        self.counters[self.size, 0] = 1


ALONE = Ranks(torch.zeros(Ranks.counters_of(1), dtype=torch.int32), 0, 1)
