"""``FairLock``: one at a time, and where several wait, each tenant in its turn.

Knows coroutines and names of tenants; does not know what is done in a turn, nor how long it may take.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """Within a tenant whoever came first goes first. All who wait share one event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the first has the next turn

    def waited_for(self) -> bool:
        """Whether somebody would have a turn if the one that is taken ended. May be asked from any thread."""
        return bool(self._lines)

    @asynccontextmanager
    async def of(self, tenant: str, timeout: float) -> AsyncIterator[None]:
        """Raises ``TimeoutError`` where the turn does not come within ``timeout`` seconds."""
        if self._taken:
            await self._wait(tenant, timeout)
        self._taken = True
        try:
            yield
        finally:
            self._next()

    async def _wait(self, tenant: str, timeout: float) -> None:
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(come)
        try:
            async with asyncio.timeout(timeout):
                await come
        except BaseException:
            if come.done() and not come.cancelled():  # its turn came at the same moment
                self._next()
            else:
                self._leave(tenant, come)
            raise

    def _leave(self, tenant: str, come: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant, deque())
        if come in line:
            line.remove(come)
            if not line:
                del self._lines[tenant]

    def _next(self) -> None:
        """The turn goes from hand to hand: nobody who comes in between takes it."""
        self._taken = False
        while self._lines and not self._taken:
            tenant, line = self._lines.popitem(last=False)
            come = line.popleft()
            if line:
                self._lines[tenant] = line
            if not come.cancelled():  # whoever has given up is about to leave the line
                come.set_result(None)
                self._taken = True
