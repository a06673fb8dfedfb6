"""``/v1/engine``: the engine at this moment, once or as a stream of events while somebody watches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.http.streaming import EventStream
from qserve.runtime.server.service import Service
from qserve.runtime.server.telemetry.engine_view import EngineView


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    watch = EngineView(service.engine)

    @routes.get("/v1/engine")
    async def engine(request: Request) -> Response:
        require_admin(request)
        return JSONResponse(await watch.picture())

    @routes.get("/v1/engine/events", include_in_schema=False)  # it has no end
    async def events(request: Request) -> Response:
        require_admin(request)
        watch.enter()
        return EventStream(_until_drained(service, watch), watch.leave)

    return routes


async def _until_drained(service: Service, watch: EngineView) -> AsyncIterator[dict[str, Any]]:
    """Pictures for as long as requests are taken, so that a watcher does not hold up a shutdown."""
    async for picture in watch.pictures():
        yield picture
        if not service.ready:
            return
