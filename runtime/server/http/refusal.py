"""``refuse``: the answer of a guard that lets a request or a WebSocket go no further."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from qserve.runtime.server.errors import APIError

PRIVATE_CODES = 4000  # the codes that a WebSocket may be closed with for reasons of our own; the status is added


async def refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    """With the error object where there is HTTP to carry it, and with a close code where there is not."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": PRIVATE_CODES + error.status, "reason": str(error)[:120]})
    else:
        await error.response(scope["path"])(scope, receive, send)
