"""``post``: one request to the server's application in this process, with no socket between."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from qserve.runtime.server.limits.keys import ApiKey

logger = logging.getLogger(__name__)


async def post(app: ASGIApp, path: str, body: bytes, key: ApiKey | None = None) -> tuple[int, bytes]:
    """The status and the content of the answer to a POST of JSON. To the application the client never leaves. ``key``:
    whose request it is, known already; it is not asked for one."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {},
    }
    if key is not None:
        scope["qserve.key"] = key
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    content = bytearray()

    async def receive() -> Message:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        nonlocal status, content
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            content += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:  # a defect: the application answers 500 and then raises it again
        if not status:
            raise
        logger.exception("a request failed")
    return status, bytes(content)
