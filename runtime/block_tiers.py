"""``BlockTiers``: which KV blocks lie in memory and on disk beside the cache, and what goes where next.

Knows keys, slots and seconds; does not know tensors, files or clocks: ``BlockStore`` does what is ordered here.

Memory has slots of one block each, and the least recently used block makes room. A block that the cache evicts is
copied into a slot. The copy is part of a step's plan, as is the one that brings it back. Everything on disk passes
through a slot: a new block in memory is written from there, and a block that a waiting request needs is read into one.
Both are orders for another thread, and no step waits for them. What gets lost on the way costs time alone: a block that
is not found is computed.

A slot is in exactly one of four states:

    free      nothing worth keeping is in it
    filled    its block can be found
    reading   a block of the disk is on its way into it
    leaving   its block can no longer be found, but is still being written
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[int, bytes]
"""A group of layers and the digest of a block, which names its salt and all tokens up to its end."""


class Transfer(NamedTuple):
    """An order for the disk: write the block in ``slot``, or read it into there."""

    key: Key
    slot: int
    to_disk: bool


class Outcome(NamedTuple):
    """What became of a transfer. ``dropped``: keys of blobs that were deleted to make room for it."""

    transfer: Transfer
    done: bool
    dropped: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Rates:
    """Measured seconds to bring one block back from memory, and from disk into memory."""

    memory: float = 0.0
    disk: float = 0.0


class BlockTiers:
    """``num_slots`` in memory, at least one. ``on_disk``: keys that the disk has, None without one.

    ``stored``, ``loaded``, ``written`` and ``read`` count blocks: into memory, back from there, to disk and back from
    there. ``received`` counts those that came from another replica, ``sent`` those that went to one. ``failed`` counts
    transfers that came to nothing.
    """

    def __init__(self, num_slots: int, on_disk: Iterable[Key] | None = None, rates: Rates = Rates()) -> None:
        self.num_slots = num_slots
        self.has_disk = on_disk is not None
        self.rates = rates
        self.stored = self.loaded = self.written = self.read = self.received = self.sent = self.failed = 0
        self._on_disk = set(on_disk or ())
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self._planned: set[int] = set()  # slots that the next plan reads
        self._reading: dict[Key, int] = {}
        self._writing: dict[Key, int] = {}
        self._orders: list[Transfer] = []
        self._block_seconds = math.inf  # to compute a block; unknown until prompts were computed
        self._changed: list[Key] | None = None  # keys that came or left since ``changes``; None where nobody asks

    @property
    def block_seconds(self) -> float | None:
        """How long it takes to compute a block; None until prompts were computed."""
        return self._block_seconds if math.isfinite(self._block_seconds) else None

    @property
    def num_filled(self) -> int:
        """Blocks in memory."""
        return len(self._slot_of)

    @property
    def num_on_disk(self) -> int:
        return len(self._on_disk)

    @property
    def num_reading(self) -> int:
        """Blocks on their way from the disk."""
        return len(self._reading)

    def computed(self, seconds: float) -> None:
        """Note how long it took to compute a block of a prompt."""
        known = math.isfinite(self._block_seconds)
        self._block_seconds = 0.9 * self._block_seconds + 0.1 * seconds if known else seconds

    def in_memory(self, key: Key) -> bool:
        """Whether a block can be loaded, and sooner than computed."""
        return key in self._slot_of and self.rates.memory < self._block_seconds

    def in_reach(self, key: Key) -> bool:
        """Whether a block is in memory, or will be sooner than it could be computed."""
        if key in self._slot_of or key in self._reading:
            return self.rates.memory < self._block_seconds
        return key in self._on_disk and self.rates.memory + self.rates.disk < self._block_seconds

    def holds(self, key: Key) -> bool:
        """Whether a block is in memory, on disk or on its way between them."""
        return key in self._slot_of or key in self._reading or key in self._on_disk or key in self._writing

    def watch(self) -> list[Key]:
        """What it ``holds``; ``changes`` tells of others from here on."""
        self._changed = []
        return list({*self._slot_of, *self._reading, *self._on_disk, *self._writing})

    def unwatch(self) -> None:
        self._changed = None

    def changes(self) -> list[Key]:
        """Keys whose blocks have left memory or disk since the last call, and may still be in the other, or have come
        from elsewhere than the cache."""
        changed, self._changed = self._changed or [], None if self._changed is None else []
        return changed

    def is_reading(self, key: Key) -> bool:
        return key in self._reading

    def is_on_disk(self, key: Key) -> bool:
        return key in self._on_disk

    def filled(self) -> dict[Key, int]:
        """The slot of each block in memory, the least recently used first."""
        return dict(self._slot_of)

    def touch(self, key: Key) -> bool:
        """Whether a block is in memory; it then is the last to leave."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            return True
        return False

    def slot(self, key: Key) -> int | None:
        """Where a block is in memory."""
        return self._slot_of.get(key)

    def load(self, key: Key) -> int:
        """The slot of a block in memory, which stays as it is until a plan reads it."""
        slot = self._slot_of[key]
        self._slot_of.move_to_end(key)
        self._planned.add(slot)
        return slot

    def store(self, key: Key) -> int | None:
        """A slot for a block that the cache evicts; None where it need not or cannot be kept."""
        if self.touch(key) or key in self._reading or (slot := self._take()) is None:
            return None
        self._slot_of[key] = slot
        self.stored += 1
        # Half of the slots may wait for a slow disk; with more, memory would have no room for what is evicted.
        known = key in self._on_disk or key in self._writing
        if self.has_disk and not known and len(self._writing) < self.num_slots // 2:
            self._writing[key] = slot
            self._orders.append(Transfer(key, slot, True))
        return slot

    def receive(self, key: Key) -> int | None:
        """A slot for a block that another replica has computed, to be filled at once; None where it is there already,
        or none can be had."""
        if self.touch(key) or key in self._reading or (slot := self._take()) is None:
            return None
        self._slot_of[key] = slot
        self.received += 1
        self._note(key)
        return slot

    @property
    def room(self) -> int:
        """Blocks that may be asked of the disk now. A part of memory is left to what is evicted."""
        return max(self.num_slots // 2 - len(self._reading), 0)

    def fetch(self, key: Key) -> bool:
        """Ask the disk for a block. False where no slot can be had."""
        slot = self._take()
        if slot is not None:
            self._reading[key] = slot
            self._orders.append(Transfer(key, slot, False))
        return slot is not None

    def planned(self) -> None:
        """A plan holds all copies so far. Later ones come in later plans, so slots that it reads may be used again."""
        self._planned.clear()

    def orders(self) -> tuple[Transfer, ...]:
        """The transfers to begin once the copies planned so far are made. Each is handed out once."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def finish(self, outcome: Outcome) -> None:
        """Take note of a transfer that was begun and has ended."""
        (key, slot, to_disk), done, dropped = outcome
        self._on_disk.difference_update(dropped)
        self._note(*dropped)
        self.failed += not done
        if to_disk:
            del self._writing[key]
            if done:
                self.written += 1
                self._on_disk.add(key)
            if self._slot_of.get(key) != slot:
                self._free.append(slot)
                self._note(key)
            return
        del self._reading[key]
        if done:
            self.read += 1
            self._slot_of[key] = slot
        else:
            self._on_disk.discard(key)
            self._free.append(slot)
            self._note(key)

    def clear(self) -> None:
        """Forget all of memory, because a step failed and its copies may not have been made. Transfers that have begun
        go on; those that have not are dropped."""
        self._note(*self._slot_of, *self._reading)
        for key, slot, to_disk in self.orders():
            del (self._writing if to_disk else self._reading)[key]
            if not to_disk:
                self._free.append(slot)
        leaving = set(self._writing.values())
        self._free += [slot for slot in self._slot_of.values() if slot not in leaving]
        self._slot_of.clear()
        self._planned.clear()

    def check(self) -> None:
        """Raise ``AssertionError`` if a slot is lost or used twice, or an order is for a slot with something else."""
        filled = set(self._slot_of.values())
        leaving = [slot for key, slot in self._writing.items() if self._slot_of.get(key) != slot]
        states = sorted([*self._free, *self._slot_of.values(), *self._reading.values(), *leaving])
        assert states == list(range(self.num_slots)), f"not in exactly one state: {states}"
        assert self._planned <= filled, "a plan reads a slot whose block is gone"
        assert not self._slot_of.keys() & self._reading.keys(), "what is in memory is read"
        assert self.has_disk or not (self._on_disk or self._reading or self._writing)
        for key, slot, to_disk in self._orders:
            assert (self._writing if to_disk else self._reading)[key] == slot, "an order for another slot"
            assert not to_disk or self._slot_of[key] == slot, "a block is written after it has left"

    def _take(self) -> int | None:
        """A slot to fill. No block leaves that the next plan loads or that is being written."""
        if self._free:
            return self._free.pop()
        for key, slot in self._slot_of.items():
            if slot not in self._planned and key not in self._writing:
                del self._slot_of[key]
                self._note(key)
                return slot
        return None

    def _note(self, *keys: Key) -> None:
        if self._changed is not None:
            self._changed += keys
