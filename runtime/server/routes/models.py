"""``/v1/models``: the model that is served, with its quality card."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model(name) for name in service.model_names]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.model(name))

    return routes
