"""``LingeringClose``: a client that is refused while it still sends its body gets to read why."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.runtime.server.http.connection import DISCARD

LINGER_SECONDS = 10.0


class LingeringClose:
    """ASGI middleware. Closing while the client still sends resets its connection, and it may never read why.

    So the whole answer goes out at once. Then the rest of the body is read and dropped, for at most ``LINGER_SECONDS``,
    before the answer counts as ended and the connection is closed. There is nothing to do where the connection stays
    open, or where the client waits to be told to go on (``Expect``).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _sends_and_closes(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        more = True

        async def watched() -> Message:
            nonlocal more
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def lingering(message: Message) -> None:
            if more and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                if (discard := scope.get(DISCARD)) is not None:
                    await discard(LINGER_SECONDS)
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while more:
                            await watched()
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, watched, lingering)


def _sends_and_closes(headers: Headers) -> bool:
    closes = "close" in {token.strip().lower() for token in headers.get("connection", "").split(",")}
    sends = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return closes and sends and "expect" not in headers
