"""``/v1/prefixes/events``: what the KV cache holds of prompts, as a stream of events for routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.http.streaming import EventStream
from qserve.runtime.server.prefix_news import Listener
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/prefixes/events", include_in_schema=False)  # it has no end
    async def events(request: Request) -> Response:
        require_admin(request)
        listener = service.prefixes.enter()
        return EventStream(_until_drained(service, listener), lambda: service.prefixes.leave(listener))

    return routes


async def _until_drained(service: Service, listener: Listener) -> AsyncIterator[dict[str, Any]]:
    """Reports for as long as requests are taken, so that a router does not hold up a shutdown."""
    async for report in service.prefixes.reports(listener):
        yield report
        if not service.ready:
            return
