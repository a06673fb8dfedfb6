from __future__ import annotations

import pytest

from qserve.runtime.blocks import BlockManager
from qserve.runtime.digests import chain_digests

SIZE = 4


def manager(num_blocks: int = 8, **kwargs: bool) -> BlockManager:
    return BlockManager(num_blocks, SIZE, **kwargs)


def hold(blocks: BlockManager, request_id: str, tokens: list[int], *, salt: str = "") -> int:
    """Open a table for ``tokens``, all of them computed and committed; returns how many were cached."""
    digests = chain_digests(tokens, SIZE, salt=salt)
    cached = blocks.open(request_id, digests)
    assert blocks.allocate(request_id, len(tokens), write_from=cached) == []
    for index in range(cached // SIZE, len(digests)):
        blocks.publish(request_id, index, digests[index])
    blocks.check()
    return cached


def test_digests_cover_full_blocks_only_and_chain() -> None:
    tokens = list(range(11))
    digests = chain_digests(tokens, SIZE)
    assert len(digests) == 2 and len(set(digests)) == 2 and all(len(d) == 32 for d in digests)
    assert chain_digests(tokens[:4], SIZE) == digests[:1]
    assert chain_digests(tokens[4:8], SIZE, parent=digests[0]) == digests[1:]
    assert chain_digests([9, *tokens[1:]], SIZE)[1] != digests[1], "a block's digest covers all before it"
    assert chain_digests(tokens, SIZE, salt="tenant") != digests
    assert chain_digests([], SIZE) == chain_digests([1, 2, 3], SIZE) == []


def test_digests_do_not_confuse_neighbouring_encodings() -> None:
    histories = [[1, 0, 0, 0], [256, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [2**32, 0, 0, 0]]
    salts = ["", "a", "ab", "\ud800"]
    digests = {chain_digests(h, SIZE, salt=s)[0] for h in histories for s in salts}
    assert len(digests) == len(histories) * len(salts)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_impossible_pools_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(num_blocks, block_size)


def test_allocate_grows_a_table_by_whole_blocks() -> None:
    blocks = manager(3)
    assert blocks.open("a") == 0 and blocks.table("a") == ()
    for tokens, held in ((1, 1), (4, 1), (5, 2), (12, 3)):
        assert blocks.allocate("a", tokens, write_from=0) == []
        assert len(blocks.table("a")) == held and blocks.num_used == held and blocks.num_free == 3 - held
        blocks.check()
    assert not blocks.can_allocate("a", 13, write_from=12)
    with pytest.raises(ValueError, match="no room for 13 tokens of a, 0 blocks"):
        blocks.allocate("a", 13, write_from=12)
    assert len(blocks.table("a")) == 3
    blocks.free("a")
    blocks.check()
    assert blocks.num_free == 3 and blocks.tables() == {}


def test_spare_blocks_are_left() -> None:
    blocks = manager(3)
    blocks.open("a")
    assert blocks.can_allocate("a", 8, write_from=0, spare=1)
    assert not blocks.can_allocate("a", 8, write_from=0, spare=2)


def test_a_table_is_opened_and_freed_once() -> None:
    blocks = manager()
    blocks.open("a")
    with pytest.raises(ValueError, match="has a table already"):
        blocks.open("a")
    blocks.free("a")
    with pytest.raises(KeyError):
        blocks.free("a")
    with pytest.raises(KeyError):
        blocks.table("a")


def test_prefix_is_shared_while_held_and_found_after_free() -> None:
    blocks = manager()
    assert hold(blocks, "a", [1] * 10) == 0
    assert hold(blocks, "b", [1] * 8 + [2, 2]) == 8
    assert blocks.table("b")[:2] == blocks.table("a")[:2] and blocks.table("b")[2] != blocks.table("a")[2]
    assert blocks.num_used == 4 and blocks.num_cached == 2
    shared = blocks.table("a")[:2]
    blocks.free("a")
    blocks.free("b")
    blocks.check()
    assert blocks.num_used == 0 and blocks.num_free == 8 and blocks.num_cached == 2
    assert hold(blocks, "c", [1] * 9) == 8 and blocks.table("c")[:2] == shared


def test_only_a_leading_run_is_found() -> None:
    blocks = manager()
    digests = chain_digests([1] * 12, SIZE)
    blocks.open("a")
    blocks.allocate("a", 12, write_from=0)
    for index in (0, 2):
        blocks.publish("a", index, digests[index])
    assert blocks.open("b", digests) == SIZE


def test_salts_do_not_meet() -> None:
    blocks = manager()
    hold(blocks, "a", [1] * 8, salt="x")
    assert hold(blocks, "b", [1] * 8, salt="y") == 0
    assert hold(blocks, "c", [1] * 8, salt="x") == 8


def test_nothing_is_found_when_caching_is_off() -> None:
    blocks = manager(enable_prefix_caching=False)
    hold(blocks, "a", [1] * 8)
    assert blocks.num_cached == 0 and blocks.open("b", chain_digests([1] * 8, SIZE)) == 0


def test_the_least_recently_used_chain_is_evicted_from_its_end() -> None:
    blocks = manager(4)
    hold(blocks, "old", [1] * 8)
    hold(blocks, "new", [2] * 8)
    blocks.free("old")
    blocks.free("new")
    blocks.open("x")
    blocks.allocate("x", 4, write_from=0)  # one block: the end of the older chain
    blocks.check()
    blocks.free("x")
    assert blocks.open("old", chain_digests([1] * 8, SIZE)) == 4
    assert blocks.open("new", chain_digests([2] * 8, SIZE)) == 8


def test_free_blocks_are_taken_before_cached_ones() -> None:
    blocks = manager(4)
    hold(blocks, "a", [1] * 8)
    blocks.free("a")
    blocks.open("b")
    blocks.allocate("b", 8, write_from=0)
    assert blocks.num_cached == 2 and blocks.open("c", chain_digests([1] * 8, SIZE)) == 8
    assert blocks.num_free == 0


def test_held_blocks_are_never_evicted() -> None:
    blocks = manager(2)
    hold(blocks, "a", [1] * 8)
    blocks.open("b")
    assert not blocks.can_allocate("b", 1, write_from=0)
    blocks.free("a")
    blocks.allocate("b", 8, write_from=0)
    blocks.check()
    assert blocks.num_cached == 0


def test_the_same_content_computed_twice_is_found_once() -> None:
    blocks = manager()
    digests = chain_digests([1] * 4, SIZE)
    for request_id in ("a", "b"):  # both before either was committed
        blocks.open(request_id)
        blocks.allocate(request_id, 4, write_from=0)
    first, second = blocks.table("a"), blocks.table("b")
    for request_id in ("a", "b"):
        blocks.publish(request_id, 0, digests[0])
        blocks.check()
    assert first != second and blocks.num_cached == 1
    assert blocks.open("c", digests) == 4 and blocks.table("c") == first
    blocks.free("b")
    blocks.check()
    assert blocks.num_free == 7, "the second copy is plain free"


def test_fork_shares_and_a_write_copies() -> None:
    blocks = manager()
    blocks.open("parent")
    blocks.allocate("parent", 6, write_from=0)
    blocks.fork("parent", "child", 6)
    blocks.check()
    assert blocks.table("child") == blocks.table("parent") and blocks.num_used == 2
    source = blocks.table("parent")[1]
    copies = blocks.allocate("child", 7, write_from=6)
    assert copies == [(source, blocks.table("child")[1])] and blocks.table("child")[1] != source
    assert blocks.table("child")[0] == blocks.table("parent")[0] and blocks.num_used == 3
    assert blocks.allocate("parent", 7, write_from=6) == [], "the last holder writes in place"
    blocks.free("parent")
    blocks.check()
    assert blocks.num_used == 2


def test_fork_takes_only_the_blocks_of_its_tokens() -> None:
    blocks = manager()
    blocks.open("parent")
    blocks.allocate("parent", 12, write_from=0)
    blocks.fork("parent", "child", 4)
    assert blocks.table("child") == blocks.table("parent")[:1]
    assert blocks.allocate("child", 5, write_from=4) == []
    with pytest.raises(ValueError, match="holds 3 of the 4 blocks"):
        blocks.fork("parent", "other", 13)
    blocks.check()
    assert set(blocks.tables()) == {"parent", "child"}


def test_a_block_rewritten_from_its_first_position_needs_no_copy() -> None:
    blocks = manager()
    blocks.open("parent")
    blocks.allocate("parent", 8, write_from=0)
    blocks.fork("parent", "child", 8)
    assert blocks.allocate("child", 8, write_from=4) == []
    assert blocks.table("child")[1] != blocks.table("parent")[1]
    blocks.check()


def test_a_findable_block_is_never_written_even_by_its_only_holder() -> None:
    blocks = manager()
    hold(blocks, "a", [1] * 8)
    blocks.fork("a", "b", 7)
    blocks.free("a")
    source = blocks.table("b")[1]
    assert blocks.allocate("b", 8, write_from=7) == [(source, blocks.table("b")[1])]
    blocks.check()
    assert blocks.open("c", chain_digests([1] * 8, SIZE)) == 8, "the cached content survived the write"


def test_copies_count_as_blocks_needed() -> None:
    blocks = manager(3)
    blocks.open("a")
    blocks.allocate("a", 11, write_from=0)
    blocks.fork("a", "b", 11)
    assert not blocks.can_allocate("b", 12, write_from=11)
    blocks.free("a")
    assert blocks.can_allocate("b", 12, write_from=11)


def test_tables_are_one_object_until_they_change() -> None:
    blocks = manager()
    hold(blocks, "a", [1] * 5)
    hold(blocks, "b", [2] * 5)
    before, other = blocks.block_tables("a"), blocks.block_tables("b")
    assert blocks.block_tables("a") is before
    blocks.allocate("a", 9, write_from=8)
    assert blocks.block_tables("a") == (blocks.table("a"),) != before and blocks.block_tables("b") is other
    blocks.truncate("a", 5)
    assert blocks.block_tables("a") == before
    blocks.check()


@pytest.mark.parametrize("damage", ["lost", "count", "stale", "twice", "shown"])
def test_check_finds_damage(damage: str) -> None:
    blocks = manager()
    hold(blocks, "a", [1] * 8)
    hold(blocks, "b", [2] * 4)
    if damage == "lost":
        blocks._free.pop()
    elif damage == "count":
        blocks._refs[blocks.table("a")[0]] += 1
    elif damage == "stale":
        blocks._digest_of.pop(blocks.table("a")[0])
    elif damage == "shown":
        blocks.block_tables("a")
        blocks._tables["a"][0].first += 1
    else:
        blocks._tables["b"][0].blocks[0] = blocks.table("a")[0]
    with pytest.raises(AssertionError):
        blocks.check()
