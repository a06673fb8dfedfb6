"""``StateSlots``: who holds which slot for the states of a sequence, and which states can be found again.

The layers of a hybrid that keep a state instead of keys hold the whole past of a sequence in it, and have no way back.
So a prompt that begins as another did can only go on from a copy of the state behind that beginning: a snapshot. It is
found under the digest of the KV block that ends there, and ends with that block.

A state is megabytes where a block is kilobytes, so only these borders of blocks have a snapshot:

    the last one of a prompt, before its last token: the same prompt, or the next turn of a conversation, goes on there
    the one up to which the KV blocks of a prompt were found, but no snapshot: there prompts with one beginning part
    every doubling of ``first_doubling`` tokens: of a long beginning that is seen for the second time half is found
    the newest one of an answer, which takes the place of the one before: the next turn, or what was preempted

A slot is free, held by a running sequence, about to become a snapshot by a plan that is not committed, or a snapshot.
No snapshot is ever held: whoever finds one copies it. So every snapshot may be evicted, the least recently used first.
At most ``num_snapshots`` slots are about to be saved, and so a slot is left for each sequence that may run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


def snapshots_for(num_running: int) -> int:
    """Slots for snapshots beside those of ``num_running`` sequences."""
    return max(4, num_running // 4)


@dataclass(slots=True)
class _Sequence:
    """``slot``: of its state. ``source``: until the plan that begins it, the snapshot that it goes on from.

    ``borders``: tokens behind which its state is still to be saved. Behind ``prompt`` tokens only its newest state is,
    and ``tail`` is the digest of that. ``saves``: by border, the slots that plans in flight fill.
    """

    slot: int
    source: int | None = None
    borders: list[int] = field(default_factory=list)
    prompt: int = 0
    tail: bytes | None = None
    saves: dict[int, int] = field(default_factory=dict)


class StateSlots:
    """Slots ``0 .. num_running + num_snapshots - 1``, for as many running sequences, and for snapshots what is left.

    ``block_size``: borders are its multiples. Without ``num_snapshots`` nothing is found again.
    """

    def __init__(self, num_running: int, num_snapshots: int, block_size: int, first_doubling: int = 512) -> None:
        self.num_running, self.num_snapshots = num_running, num_snapshots
        self._size, self._first_doubling = block_size, first_doubling
        self._free = list(range(num_running + num_snapshots - 1, -1, -1))
        self._sequences: dict[str, _Sequence] = {}
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._num_saves = 0
        self._copies: list[tuple[int, int]] = []

    def __contains__(self, digest: object) -> bool:
        """Whether there is a snapshot at the end of the block with this digest."""
        return digest in self._snapshots

    @property
    def num_found(self) -> int:
        """Snapshots that can be found."""
        return len(self._snapshots)

    @property
    def has_room(self) -> bool:
        """Whether another sequence may run."""
        return len(self._sequences) < self.num_running

    def slot(self, request_id: str) -> int:
        return self._sequences[request_id].slot

    def open(self, request_id: str, digests: Sequence[bytes], count: int, known: int) -> None:
        """Give a sequence a slot. ``digests``: of the blocks of its prompt. It goes on from the snapshot behind the
        first ``count`` of them, and ``known`` were found. There must be room."""
        source = None
        if count:
            source = self._snapshots[digests[count - 1]]
            self._snapshots.move_to_end(digests[count - 1])
        begin, prompt = count * self._size, len(digests) * self._size
        borders = {known * self._size, prompt}
        doubling = -(-self._first_doubling // self._size) * self._size
        while doubling < prompt:
            borders.add(doubling)
            doubling *= 2
        self._sequences[request_id] = _Sequence(
            self._take(), source, sorted(border for border in borders if border > begin), prompt
        )

    def begin(self, request_id: str) -> None:
        """The next plan has the first tokens of a sequence: it copies the snapshot that this goes on from."""
        sequence = self._sequences[request_id]
        if sequence.source is not None:
            self._copies.append((sequence.source, sequence.slot))
            sequence.source = None

    def fork(self, parent_id: str, child_id: str) -> None:
        """Let a sequence go on from the newest state of another."""
        parent, child = self._sequences[parent_id], self._sequences[child_id]
        child.prompt = parent.prompt
        self._copies.append((parent.slot, child.slot))

    def save(self, request_id: str, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The plan that is being made computes the tokens ``start .. stop - 1``: (tokens, slot) for each state on the
        way that it saves."""
        if not self.num_snapshots:
            return ()
        sequence, saves = self._sequences[request_id], []
        while sequence.borders and sequence.borders[0] <= stop:
            border = sequence.borders.pop(0)
            if self._num_saves < self.num_snapshots:
                saves.append((border, self._take()))
                self._num_saves += 1
        newest = stop // self._size * self._size
        if newest > max(start, sequence.prompt) and self._num_saves < self.num_snapshots:
            before = self._snapshots.pop(sequence.tail, None) if sequence.tail else None
            saves.append((newest, self._take() if before is None else before))
            self._num_saves += 1
        sequence.saves.update(saves)
        return tuple(saves)

    def publish(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        """The block that ends behind ``num_tokens`` is computed, and found under ``digest``: so is the state there, if
        it was saved."""
        sequence = self._sequences[request_id]
        slot = sequence.saves.pop(num_tokens, None)
        if slot is None:
            return
        self._num_saves -= 1
        if digest in self._snapshots:
            self._free.append(slot)
            self._snapshots.move_to_end(digest)
        else:
            self._snapshots[digest] = slot
        if num_tokens > sequence.prompt:
            sequence.tail = digest

    def drop(self, digest: bytes) -> None:
        """The block with ``digest`` is evicted: nobody could find the snapshot at its end."""
        slot = self._snapshots.pop(digest, None)
        if slot is not None:
            self._free.append(slot)

    def free(self, request_id: str) -> None:
        """End a sequence. What is being saved of it is lost."""
        sequence = self._sequences.pop(request_id)
        self._num_saves -= len(sequence.saves)
        self._free += [sequence.slot, *sequence.saves.values()]

    def forget(self) -> None:
        """Let nothing be found any more."""
        self._free += self._snapshots.values()
        self._snapshots.clear()
        self._copies.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies from slot to slot that no plan holds yet, in order. They come before the plan's tokens."""
        copies, self._copies = self._copies, []
        return copies

    def check(self, holders: Collection[str], named: Collection[bytes]) -> None:
        """Raise ``AssertionError`` if a slot is lost or used twice, if others than ``holders`` hold one, or if a
        snapshot's digest is not among ``named``: those of blocks that can be found."""
        saves = [slot for sequence in self._sequences.values() for slot in sequence.saves.values()]
        held = [sequence.slot for sequence in self._sequences.values()]
        slots = Counter([*self._free, *held, *saves, *self._snapshots.values()])
        every = Counter(range(self.num_running + self.num_snapshots))
        assert slots == every, f"a slot of states is lost or shared: {slots}"
        assert self._sequences.keys() == set(holders), "who has tables has a slot of states"
        assert len(saves) == self._num_saves <= self.num_snapshots and len(held) <= self.num_running
        assert self._snapshots.keys() <= set(named), "a snapshot has lost its block"
        for sequence in self._sequences.values():
            assert all(tokens % self._size == 0 for tokens in (*sequence.borders, *sequence.saves))

    def _take(self) -> int:
        """A slot to fill: the content of a snapshot is lost where none is free."""
        return self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
