"""No tenant keeps the others out of a shared pool, whatever they take and give back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from qserve.runtime.server.limits.shared_pool import SharedPool

MOVES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-20, 20)), max_size=60)


@given(st.integers(1, 100), MOVES)
def test_whoever_comes_next_finds_room(size: int, moves: list[tuple[str, int]]) -> None:
    pool, held = SharedPool(size), Counter[str]()
    for tenant, amount in moves:
        if amount >= 0:
            room = held[tenant] + amount <= size - held.total() - amount
            assert pool.take(tenant, amount) == room
            held[tenant] += amount * room
        elif held[tenant] >= -amount:
            pool.give_back(tenant, -amount)
            held[tenant] += amount
        pool.check()
        assert pool.free == size - held.total()
        newcomer = pool.free // 2
        assert pool.free > 0 and pool.take("new", newcomer), "half of what is left"
        pool.give_back("new", newcomer)


def test_alone_a_tenant_has_half() -> None:
    pool = SharedPool(10)
    assert [pool.take("a") for _ in range(6)] == [True] * 5 + [False]
    assert pool.take("b", 2) and not pool.take("b")
