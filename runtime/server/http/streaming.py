"""Server-sent events, and noticing that the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from qserve.runtime.server.errors import ClientGone, as_api_error
from qserve.runtime.server.http.connection import BROKEN
from qserve.runtime.server.http.json_writer import compact_json

HEARTBEAT_SECONDS = 10.0  # most proxies wait for 60; a silence lasts at most twice as long

T = TypeVar("T")


class EventStream(StreamingResponse):
    """Chunks as server-sent events. ``close`` is called at the end, also when the client leaves early.

    ``named``: each event is named by the type of its chunk, and the stream ends with the last one, without ``[DONE]``.
    ``path``: of the request; it says which shape an error has.
    """

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], close: Callable[[], None], *, named: bool = False, path: str = ""
    ) -> None:
        super().__init__(
            _events(chunks, named, path),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._close = close
        self._broken: Callable[[], bool] = lambda: False

    async def stream_response(self, send: Send) -> None:
        """With a comment wherever nothing is sent for a while: proxies end connections that are silent."""
        silent = True

        async def told(message: Message) -> None:
            nonlocal silent
            silent = False
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                beating.cancel()
            if self._broken():  # many events may be there at once, and each would be a warning in the log
                await asyncio.sleep(0)
            await send(message)

        async def beat() -> None:
            nonlocal silent
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                if silent:
                    await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                silent = True

        beating = asyncio.create_task(beat())
        try:
            await super().stream_response(told)
        finally:
            beating.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._broken = scope.get(BROKEN, self._broken)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(chunks: AsyncIterator[dict[str, Any]], named: bool, path: str) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield _event(chunk, named)
    except Exception as error:  # the status was sent long ago: the error is the last event
        yield _event(as_api_error(error).body(path), named)
        return
    if not named:
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any], named: bool) -> bytes:
    name = f"event: {content['type']}\n" if named and "type" in content else ""
    return f"{name}data: {compact_json(content)}\n\n".encode()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``; if the client leaves first, it is cancelled and ``ClientGone`` raised."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def after_first(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Wait for the first item, but no longer than a heartbeat; return an iterator over all. What fails meanwhile is
    raised here."""
    first = asyncio.ensure_future(_next(items))
    try:
        await asyncio.wait((first,), timeout=HEARTBEAT_SECONDS)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if first.done():
        first.result()

    async def chained() -> AsyncIterator[T]:
        for item in await first:
            yield item
        async for item in items:
            yield item

    return chained()


async def _next(items: AsyncIterator[T]) -> list[T]:
    """One item, or none where there are no more."""
    async for item in items:
        return [item]
    return []


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
