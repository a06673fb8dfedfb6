"""``/v1/usage``: how many tokens each caller has used. Routers keep the limits of their keys by it."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.limits.usage import usage_page
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    since = time.time()

    @routes.get("/v1/usage")
    async def usage(request: Request) -> Response:
        require_admin(request)
        return JSONResponse(usage_page(service.accounting.quotas.used, since))

    return routes
