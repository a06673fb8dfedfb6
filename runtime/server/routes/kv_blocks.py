"""``/v1/kv/blocks``: KV blocks for another replica, which shows a ticket that a router has made."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from qserve.runtime.server.kv_order import KV_PATH
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post(KV_PATH, include_in_schema=False)  # it is no part of the API
    async def blocks(request: Request) -> Response:
        found = await service.kv.send(await service.body(request))
        return Response(found, media_type="application/octet-stream")

    return routes
