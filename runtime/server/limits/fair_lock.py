"""``FairLock``: a lock for coroutines. Where several tenants wait, they have their turns one after another."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """Within a tenant the first to come goes first. All waiting coroutines share one event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the first has the next turn

    def waited_for(self) -> bool:
        """Whether somebody waits for the present turn to end. May be asked from any thread."""
        return bool(self._lines)

    @asynccontextmanager
    async def of(self, tenant: str, timeout: float) -> AsyncIterator[None]:
        """A turn, as a context manager. Raises ``TimeoutError`` where it does not come within ``timeout`` seconds."""
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
        """Hand the turn to the next in line directly, so that no newcomer can take it in between."""
        self._taken = False
        while self._lines and not self._taken:
            tenant, line = self._lines.popitem(last=False)
            come = line.popleft()
            if line:
                self._lines[tenant] = line
            if not come.cancelled():  # a cancelled one is about to leave the line
                come.set_result(None)
                self._taken = True
