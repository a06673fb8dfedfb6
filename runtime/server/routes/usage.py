"""``/v1/usage``: how many tokens each caller has used. Routers keep the limits of their keys by it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    since = time.time()

    @routes.get("/v1/usage")
    async def usage(request: Request) -> Response:
        require_admin(request)
        return JSONResponse(usage_page(service.accounting.quotas.used, since))

    return routes


def usage_page(used: Mapping[str, int], since: float) -> dict[str, Any]:
    """``used``: tokens of prompts and outputs by the names of keys, since a time in seconds since the epoch."""
    data = [{"caller": name, "object": "usage", "tokens": tokens} for name, tokens in sorted(used.items())]
    return {"object": "list", "since": since, "data": data}
