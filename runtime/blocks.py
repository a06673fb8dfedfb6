"""``BlockManager``: who holds which fixed-size block of the KV cache, and which blocks can be found again.

Knows block numbers, reference counts, block tables and digests of block contents; does not know requests or
tensors. A sequence has a table for each group of layers (``CacheLayout``), and a block holds positions of one group.

A group with a window gives a block back as soon as no later query can see it. Such a block can still be found until
somebody takes it. A cached beginning is used if every full group has all of its blocks, and every group with a window
has those that the next query sees: older ones are not needed.

A block is in exactly one of three states:

    free        nothing worth keeping is in it
    referenced  one or more block tables hold it
    evictable   no table holds it, but its content can be found under its digest; when no block is free, the least
                recently used is taken first

A sequence of a model that keeps states has a slot for them as long as it has tables (``StateSlots``). A state is only
right behind the last token that was computed. So a cached beginning of such a model must end where a snapshot of the
state was kept, and a fork copies its parent's state.

With ``BlockTiers``, what is evicted is copied into a slot of memory, and found there again. The slots are numbered
behind the blocks, so both copies read like any other. Copies are made in order, after all plans before: a block that is
loaded can therefore be found at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from qserve.runtime.block_tiers import BlockTiers, Key
from qserve.runtime.cache import blocks_needed, tokens_held, window_blocks
from qserve.runtime.state_slots import StateSlots


@dataclass(slots=True)
class _Table:
    """Blocks of a sequence from number ``first`` on; the window has passed those before it.

    ``to_load``: between ``open`` and ``allocate`` the places of blocks that are in memory, with the slots and digests.
    """

    first: int = 0
    blocks: list[int] = field(default_factory=list)
    to_load: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class BlockManager:
    """Blocks ``0 .. num_blocks - 1`` of ``block_size`` positions each.

    ``windows``: for each group of layers how many keys a query sees, 0 for all. A request has tables from ``open`` or
    ``fork`` until ``free``. ``allocate`` makes them long enough and writable, ``publish`` makes one of their blocks
    findable, ``release_passed`` gives back what lies behind the windows. ``tiers``: what is kept beside the cache.
    ``states``: the slots for what layers keep of a request instead of blocks; None where no layer does.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        windows: Sequence[int] = (0,),
        tiers: BlockTiers | None = None,
        states: StateSlots | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one position, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching and (states is None or states.num_snapshots > 0)
        self.windows = tuple(windows)
        self.has_windows = any(windows)
        self.tiers = tiers
        self.states = states
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._tables: dict[str, tuple[_Table, ...]] = {}
        self._shown: dict[str, tuple[tuple[int, ...], ...]] = {}  # ``block_tables`` until they change
        self._block_of: tuple[dict[bytes, int], ...] = tuple({} for _ in self.windows)
        self._digest_of: dict[int, tuple[int, bytes]] = {}  # with the group
        self._copies: list[tuple[int, int]] = []  # into slots and out of them, not yet handed out
        self._told_group = next((group for group, window in enumerate(windows) if not window), 0)
        self._touched: dict[bytes, None] | None = None  # digests that came or went since ``changes``; None: nobody asks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that some table holds."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their digest, in use or not."""
        return len(self._digest_of)

    @property
    def num_table_entries(self) -> int:
        """Entries of all tables together, passed ones too. A block held by several tables counts once for each."""
        return sum(table.end for tables in self._tables.values() for table in tables)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group."""
        return -(-num_tokens // self.block_size)

    def needed(self, num_tokens: int) -> int:
        """Blocks of all groups needed to compute a sequence of ``num_tokens`` tokens."""
        return blocks_needed(num_tokens, self.block_size, self.windows)

    def capacity(self, num_blocks: int, most: int) -> int:
        """Tokens of the longest sequence, at most ``most``, for which ``num_blocks`` are enough."""
        return tokens_held(num_blocks, self.block_size, self.windows, most)

    def table(self, request_id: str, group: int = 0) -> tuple[int, ...]:
        """The blocks of ``request_id`` in one group: position p lies in block ``table[p // block_size]``."""
        return _filled(self._tables[request_id][group])

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The table of each group: the same object until one of them changes."""
        shown = self._shown.get(request_id)
        if shown is None:
            shown = self._shown[request_id] = tuple([_filled(table) for table in self._tables[request_id]])
        return shown

    def spans(self, request_id: str) -> tuple[tuple[int, int], ...]:
        """For each group the positions, from and to, that its table has room for."""
        size = self.block_size
        return tuple((table.first * size, table.end * size) for table in self._tables[request_id])

    def tables(self) -> dict[str, tuple[int, ...]]:
        """The blocks that each request holds, those of all groups together."""
        return {
            request_id: tuple(block for table in tables for block in table.blocks)
            for request_id, tables in self._tables.items()
        }

    def state(self, request_id: str) -> int:
        """The slot of the states of ``request_id``; -1 where no layer keeps any."""
        return -1 if self.states is None else self.states.slot(request_id)

    def save_states(self, request_id: str, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The plan that is being made computes the tokens ``start .. stop - 1``: (tokens, slot) for each state on the
        way that it keeps a snapshot of."""
        return () if self.states is None else self.states.save(request_id, start, stop)

    def evictable(self) -> tuple[int, ...]:
        """Blocks that no table holds and that can be found again, the next to be taken first."""
        return tuple(self._evictable)

    def open(self, request_id: str, digests: Sequence[bytes] = ()) -> int:
        """Start tables with the longest run of leading ``digests`` in the cache and in memory; returns how many
        positions. ``allocate`` gets what is in memory. Where layers keep states the run ends with a snapshot."""
        at_hand = self._at_hand()
        count = known = self._num_known(digests, at_hand)
        if self.states is not None:
            ends = (n for n in range(known, 0, -1) if digests[n - 1] in self.states)
            count = next((n for n in ends if self._num_known(digests[:n], at_hand) == n), 0)
        tables = self._new_tables(request_id)
        if self.states is not None:
            self.states.open(request_id, digests, count, known)
        for group, (table, window, block_of) in enumerate(zip(tables, self.windows, self._block_of)):
            table.first = self._first(count * self.block_size, window)
            for index, digest in enumerate(digests[table.first : count]):
                block = block_of.get(digest, -1)
                table.blocks.append(block)
                if block >= 0:
                    self._hold(block)
                else:
                    assert self.tiers is not None
                    table.to_load[index] = self.tiers.load((group, digest)), digest
        return count * self.block_size

    def awaits(self, digests: Sequence[bytes], *, ask: bool) -> bool:
        """Whether ``open`` will find a longer run when blocks come from the disk. ``ask``: those that would make it
        longer are asked for first, as many as there is room for."""
        tiers = self.tiers
        if tiers is None or not (tiers.num_reading or (ask and tiers.num_on_disk)):
            return False
        waits, now = False, self._num_known(digests, self._at_hand())
        most = self._num_known(digests, self._known(tiers.in_reach))
        if ask and most > now:
            most = self._num_known(digests[: now + tiers.room // len(self.windows)], self._known(tiers.in_reach))
        for group, (window, block_of) in enumerate(zip(self.windows, self._block_of)):
            for digest in digests[self._first(most * self.block_size, window) : most]:
                key = group, digest
                if digest not in block_of and not tiers.touch(key) and ask and not tiers.is_reading(key):
                    tiers.fetch(key)
                waits = waits or tiers.is_reading(key)
        return waits

    def can_fork(self, parent_id: str, num_tokens: int) -> bool:
        """Whether the parent still holds what a query behind its first ``num_tokens`` positions sees. A parent with a
        state does not: it is behind its last position."""
        return self.states is None and all(
            table.first <= self._first(num_tokens, window)
            for table, window in zip(self._tables[parent_id], self.windows)
        )

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Start tables that share the parent's blocks of the first ``num_tokens`` positions, as far as the next query
        sees them. A copy of the parent's state comes with ``take_state_copies``: it must be that of these positions."""
        count, parents = self.blocks_for(num_tokens), self._tables[parent_id]
        held = min(table.end for table in parents)
        if held < count or not (self.states or self.can_fork(parent_id, num_tokens)):
            raise ValueError(f"{parent_id} holds {held} of the {count} blocks of {num_tokens} tokens")
        children = self._new_tables(child_id)
        if self.states is not None:
            self.states.open(child_id, (), 0, 0)
            self.states.fork(parent_id, child_id)
        for table, parent, window in zip(children, parents, self.windows):
            table.first = self._first(num_tokens, window)
            for block in parent.blocks[table.first - parent.first : count - parent.first]:
                self._hold(block)
                table.blocks.append(block)

    def is_writable(self, request_id: str, position: int) -> bool:
        """Whether the blocks of ``position`` exist and belong to these tables alone: ``allocate`` has nothing to do."""
        index = position // self.block_size
        for table in self._tables[request_id]:
            blocks, at = table.blocks, index - table.first
            if at >= len(blocks) or self._refs[block := blocks[at]] != 1 or block in self._digest_of:
                return False
        return True

    def missing(self, request_id: str, num_tokens: int, *, write_from: int, stepwise: bool = False) -> int:
        """Blocks that ``allocate`` would take."""
        return sum(
            len(self._unwritable(table, stop, write_from)) + max(stop - table.end, 0) + len(table.to_load)
            for table, stop in self._stops(request_id, num_tokens, stepwise)
        )

    def can_allocate(self, request_id: str, num_tokens: int, *, write_from: int, spare: int = 0) -> bool:
        """Whether ``allocate`` would succeed and leave ``spare`` blocks."""
        return self.missing(request_id, num_tokens, write_from=write_from) + spare <= self.num_free

    def allocate(
        self, request_id: str, num_tokens: int, *, write_from: int, stepwise: bool = False
    ) -> list[tuple[int, int]]:
        """Make positions ``write_from .. num_tokens - 1`` of the tables writable, growing them as needed.

        ``stepwise``: the positions are computed in several steps, so groups with a window get only what one window
        needs; the rest comes with ``extend`` or ``allocate``, when other blocks are passed.

        A block among them that others hold or can find is replaced by a private one. Returns the copies
        ``(source, destination)`` that must be made, in order, before anything else touches the cache; a block whose
        positions are all about to be written needs none. Raises ``ValueError``, changing nothing, when there are too
        few blocks.
        """
        if self.missing(request_id, num_tokens, write_from=write_from, stepwise=stepwise) > self.num_free:
            raise ValueError(
                f"no room for {num_tokens} tokens of {request_id}, {self.num_free} blocks are free"
            )
        self._shown.pop(request_id, None)
        self._load(request_id)
        if self.states is not None:
            self.states.begin(request_id)
        copies: list[tuple[int, int]] = []
        for table, stop in self._stops(request_id, num_tokens, stepwise):
            blocks = table.blocks
            for index in self._unwritable(table, stop, write_from):
                source, blocks[index] = blocks[index], self._take()
                if (table.first + index) * self.block_size < write_from:
                    copies.append((source, blocks[index]))
                self._release(source)
            while table.end < stop:
                blocks.append(self._take())
        return [*self.take_copies(), *copies]

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies into memory and back that no plan holds yet, in order; they come before those that follow."""
        copies, self._copies = self._copies, []
        return copies

    def take_state_copies(self) -> list[tuple[int, int]]:
        """Copies of states, from slot to slot, that no plan holds yet, in order."""
        return [] if self.states is None else self.states.take_copies()

    def extend(self, request_id: str, num_tokens: int, *, spare: int) -> int:
        """Let the groups with a window grow towards ``num_tokens`` positions while more than ``spare`` blocks can be
        taken. Returns the number of positions that all groups now have room for."""
        if not self.has_windows:
            return num_tokens
        tables, stop = self._tables[request_id], self.blocks_for(num_tokens)
        self._shown.pop(request_id, None)
        while (table := min(tables, key=lambda table: table.end)).end < stop and self.num_free > spare:
            table.blocks.append(self._take())
        return min(num_tokens, table.end * self.block_size)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Give back what the tables hold beyond their first ``num_tokens`` positions."""
        stop = self.blocks_for(num_tokens)
        for table in self._tables[request_id]:
            while table.end > stop:
                self._release(table.blocks.pop())
                self._shown.pop(request_id, None)

    def release_passed(self, request_id: str, num_tokens: int) -> None:
        """Give back what no query behind the first ``num_tokens`` positions sees."""
        for table, window in zip(self._tables[request_id], self.windows):
            passed = self._first(num_tokens, window) - table.first
            if passed > 0:
                for block in table.blocks[:passed]:
                    self._release(block)
                del table.blocks[:passed]
                table.first += passed
                self._shown.pop(request_id, None)

    def publish(self, request_id: str, index: int, digest: bytes) -> None:
        """Block ``index`` of every table is completely written; let others find it under ``digest``.

        If the digest is known already, it stays with the block that has it while somebody holds that block. Otherwise
        it moves to this block, and the old block becomes free.
        """
        if not self.enable_prefix_caching:
            return
        for group, (table, block_of) in enumerate(zip(self._tables[request_id], self._block_of)):
            block = table.blocks[index - table.first]
            if block in self._digest_of:
                continue
            known = block_of.get(digest)
            if known is not None:
                if self._refs[known]:
                    continue
                del self._evictable[known], self._digest_of[known]
                self._free.append(known)
            block_of[digest] = block
            self._digest_of[block] = group, digest
            self._touch(group, digest)
        if self.states is not None:
            self.states.publish(request_id, (index + 1) * self.block_size, digest)

    def watch(self) -> list[bytes]:
        """The digests under which blocks can be found now, in the cache or in the tiers beside it; ``changes`` tells
        from here on. Of several groups of layers it is the first without a window that is told of."""
        self._touched = {}
        held = dict.fromkeys(self._block_of[self._told_group])
        if self.tiers is not None:
            held |= dict.fromkeys(digest for group, digest in self.tiers.watch() if group == self._told_group)
        return list(held)

    def unwatch(self) -> None:
        """Nobody asks for ``changes`` any more."""
        self._touched = None
        if self.tiers is not None:
            self.tiers.unwatch()

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Digests of blocks that can be found, and of those that cannot be any more, as far as either may have changed
        since ``watch`` or the last call."""
        if self._touched is None:
            return [], []
        if self.tiers is not None:
            for key in self.tiers.changes():
                self._touch(*key)
        if not self._touched:
            return [], []
        held, gone = list[bytes](), list[bytes]()
        for digest in self._touched:
            (held if self._holds(digest) else gone).append(digest)
        self._touched = {}
        return held, gone

    def forget(self) -> None:
        """Let nothing be found any more, because a step failed and its copies may not have been made. No request has a
        table."""
        assert not self._tables
        for digest in self._block_of[self._told_group]:
            self._touch(self._told_group, digest)
        self._free += self._evictable
        self._evictable.clear()
        self._digest_of.clear()
        for block_of in self._block_of:
            block_of.clear()
        self._copies.clear()
        if self.states is not None:
            self.states.forget()
        if self.tiers is not None:
            self.tiers.clear()

    def find(self, key: Key) -> int | None:
        """The block or slot that can be read under a key, if its copies were made."""
        group, digest = key
        block = self._block_of[group].get(digest)
        if block is None and self.tiers is not None and (slot := self.tiers.slot(key)) is not None:
            return self.num_blocks + slot
        return block

    def findable(self) -> list[tuple[Key, int]]:
        """(group, digest) and number of each block that can be found, the next to be evicted first."""
        held = [block for block in self._digest_of if block not in self._evictable]
        return [(self._digest_of[block], block) for block in (*self._evictable, *held)]

    def free(self, request_id: str) -> None:
        """End the tables. Their last blocks are evicted first: a chain is useless without its beginning, but a window
        is useless without its end."""
        self._shown.pop(request_id, None)
        if self.states is not None:
            self.states.free(request_id)
        for table, window in zip(self._tables.pop(request_id), self.windows):
            for block in table.blocks if window else reversed(table.blocks):
                if block >= 0:  # else it was not loaded
                    self._release(block)

    def check(self) -> None:
        """Raise ``AssertionError`` if a block is lost, shared wrongly or findable wrongly, in any group."""
        groups = [Counter[int]() for _ in self.windows]
        for tables in self._tables.values():
            for blocks, table in zip(groups, tables, strict=True):
                blocks.update(table.blocks)
        held = sum(groups, Counter[int]())
        assert len(held) == sum(map(len, groups)), "two groups hold one block"
        for request_id, tables in self._tables.items():
            for table, window in zip(tables, self.windows, strict=True):
                assert len(set(table.blocks)) == len(table.blocks), f"{request_id} holds a block twice: {table}"
                assert table.first == 0 or window, f"{request_id} has passed what it sees: {table}"
        assert self._shown.keys() <= self._tables.keys()
        for request_id, shown in self._shown.items():
            assert shown == tuple(map(_filled, self._tables[request_id])), f"{request_id} is shown old tables"
        assert self._refs == [held[block] for block in range(self.num_blocks)], "reference counts are wrong"
        states = sorted([*self._free, *self._evictable, *held])
        assert states == list(range(self.num_blocks)), f"not in exactly one state: {states}"
        assert self.num_free + self.num_used == self.num_blocks and self.num_used == len(held)
        named = {block: (g, digest) for g, known in enumerate(self._block_of) for digest, block in known.items()}
        assert self._digest_of == named
        assert len(named) == sum(map(len, self._block_of)), "two digests name one block"
        for block, (group, _) in named.items():
            assert block not in held or block in groups[group], "a block is found by a group that does not hold it"
        assert set(self._evictable) == set(self._digest_of) - set(held), "evictable is findable and not held"
        if self.states is not None:
            self.states.check(self._tables, set[bytes].intersection(*map(set, self._block_of)))
        if self.tiers is not None:
            self.tiers.check()

    def _new_tables(self, request_id: str) -> tuple[_Table, ...]:
        if request_id in self._tables:
            raise ValueError(f"{request_id} has a table already")
        if self.states is not None and not self.states.has_room:
            raise ValueError(f"no room for {request_id}: {self.states.num_running} sequences have states already")
        self._tables[request_id] = tuple(_Table() for _ in self.windows)
        return self._tables[request_id]

    def _first(self, num_tokens: int, window: int) -> int:
        """The first block that the query behind ``num_tokens`` positions sees."""
        return max(num_tokens - window + 1, 0) // self.block_size if window else 0

    def _stops(self, request_id: str, num_tokens: int, stepwise: bool) -> list[tuple[_Table, int]]:
        """Each table with the number of its blocks that ``allocate`` makes for ``num_tokens`` positions."""
        tables, stop = self._tables[request_id], self.blocks_for(num_tokens)
        if not (stepwise and self.has_windows):
            return [(table, stop) for table in tables]
        return [
            (table, min(stop, table.first + window_blocks(window, self.block_size)) if window else stop)
            for table, window in zip(tables, self.windows)
        ]

    def _num_known(self, digests: Sequence[bytes], known: Sequence[Container[bytes]]) -> int:
        """How many leading ``digests`` are ``known``, in all groups, as far as they are seen."""
        count = len(digests)
        for window, group in zip(self.windows, known):
            if not window:
                count = next((i for i, digest in enumerate(digests[:count]) if digest not in group), count)
        while self.has_windows and (gap := self._gap(digests, count, known)) is not None:
            count = gap
        return count

    def _gap(self, digests: Sequence[bytes], count: int, known: Sequence[Container[bytes]]) -> int | None:
        """The last missing block that a window behind ``count`` blocks needs; None where it has all."""
        for window, group in zip(self.windows, known):
            if window:
                for index in range(count - 1, self._first(count * self.block_size, window) - 1, -1):
                    if digests[index] not in group:
                        return index
        return None

    def _at_hand(self) -> Sequence[Container[bytes]]:
        """For each group what ``open`` finds."""
        return self._block_of if self.tiers is None else self._known(self.tiers.in_memory)

    def _known(self, elsewhere: Callable[[Key], bool]) -> Sequence[Container[bytes]]:
        """For each group what is in the cache or ``elsewhere``."""
        return [_Known(group, block_of, elsewhere) for group, block_of in enumerate(self._block_of)]

    def _unwritable(self, table: _Table, stop: int, write_from: int) -> list[int]:
        """Indices among the first ``stop`` blocks of the table that will be written but may not be."""
        blocks = table.blocks
        written = range(max(write_from // self.block_size - table.first, 0), min(stop - table.first, len(blocks)))
        return [i for i in written if self._refs[blocks[i]] > 1 or blocks[i] in self._digest_of]

    def _load(self, request_id: str) -> None:
        """Give blocks to what ``open`` found in memory alone, and let others find them."""
        for group, (table, block_of) in enumerate(zip(self._tables[request_id], self._block_of)):
            for index, (slot, digest) in table.to_load.items():
                block = table.blocks[index] = self._take()
                self._copies.append((self.num_blocks + slot, block))
                if digest not in block_of:  # else a beam has just loaded it too
                    block_of[digest], self._digest_of[block] = block, (group, digest)
                    self._touch(group, digest)
                if self.tiers is not None:
                    self.tiers.loaded += 1
            table.to_load.clear()

    def _touch(self, group: int, digest: bytes) -> None:
        if self._touched is not None and group == self._told_group:
            self._touched[digest] = None

    def _holds(self, digest: bytes) -> bool:
        group = self._told_group
        return digest in self._block_of[group] or (self.tiers is not None and self.tiers.holds((group, digest)))

    def _hold(self, block: int) -> None:
        self._evictable.pop(block, None)
        self._refs[block] += 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            group, digest = self._digest_of.pop(block)
            del self._block_of[group][digest]
            self._touch(group, digest)
            if self.states is not None:
                self.states.drop(digest)
            if self.tiers is not None and (slot := self.tiers.store((group, digest))) is not None:
                self._copies.append((block, self.num_blocks + slot))
        self._refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._digest_of:
                self._evictable[block] = None
            else:
                self._free.append(block)


@dataclass(frozen=True, slots=True)
class _Known:
    group: int
    block_of: Mapping[bytes, int]
    elsewhere: Callable[[Key], bool]

    def __contains__(self, digest: object) -> bool:
        return digest in self.block_of or self.elsewhere((self.group, digest))  # type: ignore[arg-type]


def _filled(table: _Table) -> tuple[int, ...]:
    """Passed blocks read like the first held block: kernels that load more than they use find its number there."""
    return tuple(table.blocks[:1] * table.first + table.blocks) if table.first else tuple(table.blocks)
