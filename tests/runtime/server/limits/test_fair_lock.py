"""Whose turn it is: in order within a tenant, in rotation between tenants, and nobody is forgotten or let in twice."""

from __future__ import annotations

import asyncio

import pytest

from qserve.runtime.server.limits.fair_lock import FairLock


async def served(line: list[str]) -> list[str]:
    """The order in which those of ``line`` (tenant and number) have their turns, all of them waiting from the start."""
    turns, order = FairLock(), []

    async def one(name: str) -> None:
        async with turns.of(name[0], 60):
            order.append(name)
            await asyncio.sleep(0)

    async with turns.of("z", 60):
        waiting = [asyncio.ensure_future(one(name)) for name in line]
        await asyncio.sleep(0)
        assert turns.waited_for() and not order
    await asyncio.gather(*waiting)
    assert not turns.waited_for()
    return order


def test_tenants_take_turns() -> None:
    order = asyncio.run(served(["a1", "a2", "a3", "a4", "b1", "c1", "c2"]))
    assert order == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]


def test_whoever_gives_up_leaves_the_line() -> None:
    async def scene() -> None:
        turns, order = FairLock(), []

        async def one(name: str, timeout: float) -> None:
            async with turns.of(name, timeout):
                order.append(name)

        async with turns.of("z", 60):
            late = asyncio.ensure_future(one("late", 0.0))
            gone = asyncio.ensure_future(one("gone", 60))
            stays = asyncio.ensure_future(one("stays", 60))
            with pytest.raises(TimeoutError):
                await late
            gone.cancel()
        await stays
        assert order == ["stays"] and gone.cancelled() and not turns.waited_for()

    asyncio.run(scene())


def test_a_turn_that_comes_to_one_who_is_cancelled_goes_on() -> None:
    async def scene() -> None:
        turns = FairLock()

        async def one() -> str:
            async with turns.of("a", 60):
                return "served"

        async with turns.of("z", 60):
            first, second = asyncio.ensure_future(one()), asyncio.ensure_future(one())
            await asyncio.sleep(0)
        first.cancel()  # its turn has come, and it has not noticed yet
        assert await second == "served" and not turns.waited_for()
        async with turns.of("a", 60):
            pass

    asyncio.run(scene())
