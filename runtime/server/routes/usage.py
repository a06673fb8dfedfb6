"""``/v1/usage``: how many tokens each caller has used. Routers keep the limits of their keys by it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/usage")
    async def usage(request: Request) -> Response:
        require_admin(request)
        return JSONResponse(service.accounting.quotas.used.page())

    return routes
