"""``Shard``: which part of a model a rank has. Outputs of products are divided: each sum is computed whole by one rank,
in the order that it has on a single one. Where ranks reduce (``Exchange``), every second product is divided by the same
parts of its inputs instead.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 16
"""Outputs are divided between the tiles of the kernels, where there are enough of them."""


@dataclass(frozen=True)
class Shard:
    """The part of ``rank``, one of ``size``."""

    rank: int = 0
    size: int = 1

    @property
    def all(self) -> tuple[Shard, ...]:
        """Those of all ranks, in their order."""
        return tuple(Shard(rank, self.size) for rank in range(self.size))

    def part(self, count: int, unit: int = LANES) -> range:
        """Its share of ``count`` outputs, in units of ``unit`` where each rank gets one. Not empty where ``count`` is
        at least ``size``."""
        if count < self.size * unit:
            unit = 1
        units = -(-count // unit)
        first, end = (min(count, units * at // self.size * unit) for at in (self.rank, self.rank + 1))
        return range(first, end)

    def heads(self, heads: int, kv_heads: int) -> tuple[range, range]:
        """Its query heads and the key heads that they read. Where there are fewer key heads than ranks, several ranks
        have the same one, each with some of its query heads. Not empty where ``heads`` is at least ``size``."""
        group = heads // kv_heads
        if kv_heads >= self.size:
            keys = self.part(kv_heads, 1)
            return range(keys.start * group, keys.stop * group), keys
        key = self.rank * kv_heads // self.size
        sharing = [rank for rank in range(self.size) if rank * kv_heads // self.size == key]
        queries = Shard(sharing.index(self.rank), len(sharing)).part(group, 1)
        return range(key * group + queries.start, key * group + queries.stop), range(key, key + 1)
