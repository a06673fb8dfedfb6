"""``/v1/models``: the model that is served, with its quality card, and its adapters."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        names = [*service.model_names, *service.engine.adapters]
        return JSONResponse({"object": "list", "data": [service.model_card(name) for name in names]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.adapter(name)
        return JSONResponse(service.model_card(name))

    return routes
