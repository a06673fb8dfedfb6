"""``RankGroup``: what the ranks of a model share."""

from __future__ import annotations

import mmap
import os
from math import prod

import torch
from torch import Tensor

from qserve.kernels.ops import AllGather, Op, Rows
from qserve.kernels.ranks import ALONE, Ranks
from qserve.runtime.parallel.shard import Shard
from qserve.runtime.parallel.stage import Stage

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
    """A ``shard`` of every layer, or a ``stage`` of the layers, among those of the others; by default the whole model.
    ``memory`` is shared by all ranks; without it nothing can be exchanged, but sizes are the same. ``shared_bytes``:
    what was taken of it by ``empty``."""

    def __init__(
        self, shard: Shard | None = None, memory: SharedMemory | None = None, stage: Stage | None = None
    ) -> None:
        self.shard, self.stage = shard or Shard(), stage or Stage()
        self.shared_bytes = 0
        self._memory = memory
        self.ranks = ALONE
        if memory is not None:
            part = self.stage if self.stage.size > 1 else self.shard
            self.ranks = Ranks(memory.take(Ranks.counters_of(part.size), torch.int32), part.rank, part.size)

    @property
    def sharing(self) -> Ranks:
        """Those that compute each layer together: stages do not."""
        return self.ranks if self.shard.size > 1 else ALONE

    @property
    def is_first(self) -> bool:
        """Whether this rank does what only one may."""
        return self.shard.rank == 0

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that all ranks write and read."""
        if self.shard.size > 1:
            self.shared_bytes += prod(shape) * dtype.itemsize
            if self._memory is not None:
                return self._memory.take(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def gather(self, out: Tensor, rows: Rows = "tokens") -> list[Op]:
        """The operation behind the last write to ``out``; none where there is one rank."""
        return [AllGather(out, self.sharing, rows)] if self.shard.size > 1 else []
