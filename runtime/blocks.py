"""``BlockManager``: who holds which fixed-size block of the KV cache, and which blocks can be found again.

Knows block numbers, reference counts, block tables and digests of block contents; does not know requests or
tensors. A block is in exactly one of three states:

    free        nothing worth keeping is in it
    referenced  one or more block tables hold it
    evictable   no table holds it, but its content can be found under its digest; taken, least recently used
                first, when no block is free
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence


def chain_digests(
    token_ids: Sequence[int], block_size: int, *, salt: str = "", parent: bytes | None = None
) -> list[bytes]:
    """One digest per full block of ``token_ids``, each over its predecessor's digest and its own tokens.

    Equal digests therefore mean equal token histories under the same salt (blake2b, 256 bits: no collision
    can be found, so nobody can craft a prompt that reads another's cache). ``parent`` is the digest of the
    block before the first; None starts a chain from ``salt``.
    """
    digest = parent or hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    digests = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = array("q", token_ids[start : start + block_size]).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=32).digest()
        digests.append(digest)
    return digests


class BlockManager:
    """Blocks ``0 .. num_blocks - 1`` of ``block_size`` positions each.

    A request's table lives from ``open`` or ``fork`` until ``free``; ``allocate`` makes it long enough and
    writable, ``publish`` makes one of its blocks findable.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one position, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

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
        return len(self._block_of)

    @property
    def num_table_entries(self) -> int:
        """Entries of all tables together: a block that several hold counts for each of them."""
        return sum(map(len, self._tables.values()))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of ``request_id``: position p lies in block ``table[p // block_size]``."""
        return tuple(self._tables[request_id])

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {request_id: tuple(table) for request_id, table in self._tables.items()}

    def evictable(self) -> tuple[int, ...]:
        """Blocks that no table holds and that can be found again, the next to be taken first."""
        return tuple(self._evictable)

    def open(self, request_id: str, digests: Sequence[bytes] = ()) -> int:
        """Start a table with the longest cached run of leading ``digests``; returns how many positions."""
        table = self._new_table(request_id)
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._hold(block)
            table.append(block)
        return len(table) * self.block_size

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Start a table that shares the parent's blocks of the first ``num_tokens`` positions."""
        count = self.blocks_for(num_tokens)
        shared = self._tables[parent_id][:count]
        if len(shared) < count:
            raise ValueError(f"{parent_id} holds {len(shared)} of the {count} blocks of {num_tokens} tokens")
        table = self._new_table(child_id)
        for block in shared:
            self._hold(block)
            table.append(block)

    def is_writable(self, request_id: str, position: int) -> bool:
        """Whether the block of ``position`` is there and the table's own: ``allocate`` has nothing to do for it."""
        table, index = self._tables[request_id], position // self.block_size
        return index < len(table) and self._refs[block := table[index]] == 1 and block not in self._digest_of

    def missing(self, request_id: str, num_tokens: int, *, write_from: int) -> int:
        """Blocks that ``allocate`` would take."""
        table = self._tables[request_id]
        return len(self._unwritable(table, num_tokens, write_from)) + max(self.blocks_for(num_tokens) - len(table), 0)

    def can_allocate(self, request_id: str, num_tokens: int, *, write_from: int, spare: int = 0) -> bool:
        """Whether ``allocate`` would succeed and leave ``spare`` blocks."""
        return self.missing(request_id, num_tokens, write_from=write_from) + spare <= self.num_free

    def allocate(self, request_id: str, num_tokens: int, *, write_from: int) -> list[tuple[int, int]]:
        """Make positions ``write_from .. num_tokens - 1`` of a table writable, growing it as needed.

        A block there that others hold or can find is replaced by one of its own. Returns the copies
        ``(source, destination)`` that must be made, in order, before anything else touches the cache; a block
        whose every position is about to be written needs none. Raises ``ValueError``, changing nothing, when
        there are too few blocks.
        """
        table = self._tables[request_id]
        unwritable, more = self._unwritable(table, num_tokens, write_from), self.blocks_for(num_tokens) - len(table)
        if len(unwritable) + max(more, 0) > self.num_free:
            raise ValueError(
                f"no room for {num_tokens} tokens of {request_id}, {self.num_free} blocks are free"
            )
        copies = []
        for index in unwritable:
            source, table[index] = table[index], self._take()
            if index * self.block_size < write_from:
                copies.append((source, table[index]))
            self._release(source)
        for _ in range(more):
            table.append(self._take())
        return copies

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Give back what a table holds beyond its first ``num_tokens`` positions."""
        table = self._tables[request_id]
        while len(table) > self.blocks_for(num_tokens):
            self._release(table.pop())

    def publish(self, request_id: str, index: int, digest: bytes) -> None:
        """Block ``index`` of the table is completely written; let others find it under ``digest``.

        A digest that is known already stays with the block it has.
        """
        block = self._tables[request_id][index]
        if self.enable_prefix_caching and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def free(self, request_id: str) -> None:
        """End a table. Its last blocks are evicted first: a chain is useless without its beginning."""
        for block in reversed(self._tables.pop(request_id)):
            self._release(block)

    def check(self) -> None:
        """Raise ``AssertionError`` unless no block is lost, shared wrongly or findable wrongly."""
        held = Counter(block for table in self._tables.values() for block in table)
        for request_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"{request_id} holds a block twice: {table}"
        assert self._refs == [held[block] for block in range(self.num_blocks)], "reference counts are wrong"
        states = Counter([*self._free, *self._evictable, *held])
        assert states == Counter(range(self.num_blocks)), f"not in exactly one state: {states}"
        assert self.num_free + self.num_used == self.num_blocks and self.num_used == len(held)
        assert self._digest_of == {block: digest for digest, block in self._block_of.items()}
        assert len(self._digest_of) == len(self._block_of), "two digests name one block"
        assert set(self._evictable) == set(self._digest_of) - set(held), "evictable is findable and not held"

    def _new_table(self, request_id: str) -> list[int]:
        if request_id in self._tables:
            raise ValueError(f"{request_id} has a table already")
        self._tables[request_id] = []
        return self._tables[request_id]

    def _unwritable(self, table: list[int], num_tokens: int, write_from: int) -> list[int]:
        stop = min(self.blocks_for(num_tokens), len(table))
        written = range(write_from // self.block_size, stop)
        return [i for i in written if self._refs[table[i]] > 1 or table[i] in self._digest_of]

    def _hold(self, block: int) -> None:
        self._evictable.pop(block, None)
        self._refs[block] += 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._digest_of:
                self._evictable[block] = None
            else:
                self._free.append(block)
