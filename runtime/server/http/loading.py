"""``LoadingApp``: answers on the port while the model is still being loaded."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.runtime.server.errors import APIError

TRY_AGAIN_LATER = 1013  # RFC 6455's registry of WebSocket close codes


class LoadingApp:
    """ASGI application: alive and not ready until ``app`` is set, which then takes every request."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
        elif scope["type"] == "http":
            probes = {"/health": 200, "/ready": 503}
            if (status := probes.get(scope["path"])) is not None:
                response = JSONResponse({"status": "loading"}, status)
            else:
                message = "the model is being loaded; try again in a few seconds"
                response = APIError(503, message, code="loading", headers={"Retry-After": "5"}).response(scope["path"])
            await response(scope, receive, send)
