"""``RankGroup``: what the ranks of a model share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from qserve.kernels import process_group
from qserve.kernels.ops import AllGather, AllReduce, Op, Rows
from qserve.kernels.ranks import ALONE, Ranks
from qserve.runtime.parallel.shard import Shard
from qserve.runtime.parallel.stage import Stage

Exchange = Literal["memory", "all-gather", "all-reduce"]
"""How ranks with shards get what others computed: they write into buffers that all share; or each has buffers of its
own, and they send each other the outputs of a product, or the terms of its sums, of which each has computed some."""

_ROOM = 1 << 40  # that a file in memory may grow to; what nothing touches takes none


class SharedMemory:
    """Zeroed memory of several processes. Each takes the same pieces in the same order. ``fd``: of the file in memory
    behind it, which another process has made; None makes one."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("qserve-ranks")
            os.ftruncate(fd, _ROOM)
        self.fd = fd
        self.nbytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next piece, at the beginning of a page."""
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        area = mmap.mmap(self.fd, size, offset=self.nbytes)
        self.nbytes += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return torch.frombuffer(area, dtype=dtype).view(shape)

    def close(self) -> None:
        """No more pieces; those that were taken stay."""
        os.close(self.fd)


class RankGroup:
    """A ``shard`` of each layer of a ``stage``, among those of the others; by default the whole model. ``memory`` is
    shared by the ranks of the stage, ``everyone`` (by default the same) by those of all stages; without them nothing
    can be exchanged, but sizes are the same. ``shared_bytes``: what was taken by ``empty``. ``exchange``: of shards;
    all but ``memory`` go by ``kernels.process_group``.

    ``ranks`` compute each layer together. ``stages`` are the first ranks of all stages.
    """

    def __init__(
        self,
        shard: Shard | None = None,
        memory: SharedMemory | None = None,
        stage: Stage | None = None,
        exchange: Exchange = "memory",
        everyone: SharedMemory | None = None,
    ) -> None:
        self.shard, self.stage, self.exchange = shard or Shard(), stage or Stage(), exchange
        self.shared_bytes = 0
        self.memory, self.everyone = memory, everyone or memory
        self.ranks, self.stages = _ranks(self.shard, memory), _ranks(self.stage, self.everyone)

    @property
    def number(self) -> int:
        """Of this rank among those of all stages."""
        return self.stage.rank * self.shard.size + self.shard.rank

    @property
    def shares_memory(self) -> bool:
        """Whether buffers of ``empty`` are the same in all ranks."""
        return self.shard.size > 1 and self.exchange == "memory"

    @property
    def apart(self) -> bool:
        """Whether each rank has buffers of its own."""
        return self.shard.size > 1 and self.exchange != "memory"

    @property
    def reduces(self) -> bool:
        """Whether a rank has terms of sums, and its buffers are added to those of others."""
        return self.apart and self.exchange == "all-reduce"

    @property
    def is_first(self) -> bool:
        """Whether this rank does what only one may."""
        return self.shard.rank == 0

    @property
    def adds_rows(self) -> bool:
        """Whether this rank does what is added to whole rows of a buffer of ``empty``."""
        return self.is_first or self.apart

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of which each rank writes a part and reads all."""
        if self.shares_memory:
            self.shared_bytes += prod(shape) * dtype.itemsize
            if self.memory is not None:
                return self.memory.take(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def gather(
        self, out: Tensor, split: Sequence[range] = (), rows: Rows = "tokens", own: Tensor | None = None
    ) -> list[Op]:
        """The operation behind the last write to ``out``, where there are several ranks. ``split`` and ``own``: as
        ``AllGather`` takes them, where ranks do not share memory."""
        if self.apart:
            return [AllGather(out, self.ranks, rows, tuple(split), own)]
        return [AllGather(out, self.ranks, rows)] if self.shard.size > 1 else []

    def reduce(self, out: Tensor) -> list[Op]:
        """The operation behind the last write to ``out``, of which each rank has some terms."""
        return [AllReduce(out, self.ranks)]

    def give_up(self) -> None:
        """A rank has ended: what waits for it need not any more."""
        for ranks in (self.ranks, self.stages):
            if ranks is not ALONE:
                ranks.give_up()
        if self.exchange != "memory":
            process_group.give_up()

    def leave(self) -> None:
        """Exchange no more."""
        if self.exchange != "memory":
            process_group.leave()

    def share(self, out: Tensor) -> None:
        """``out`` becomes that of the first rank, where each has one of its own."""
        if self.apart:
            process_group.broadcast(self.ranks, out)

    def least(self, number: int, device: torch.device) -> int:
        """The least of the numbers that ranks have which do not share memory."""
        if self.apart:
            return process_group.least(self.ranks, number, device)
        return number


def _ranks(part: Shard | Stage, memory: SharedMemory | None) -> Ranks:
    if memory is None or part.size == 1:
        return ALONE
    return Ranks(memory.take(Ranks.counters_of(part.size), torch.int32), part.rank, part.size)
