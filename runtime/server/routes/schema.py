"""``/openapi.json``: this server's interface, for tools that generate clients or try to break servers."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from qserve.runtime.server.openai.openapi import document
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    made: dict[tuple[str, ...], bytes] = {}  # by the names of the model and its adapters

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        names = (*service.model_names, *service.engine.adapters)
        if names not in made:  # at the first call every route exists
            made.clear()
            made[names] = json.dumps(document(request.app.routes, names)).encode()
        return Response(made[names], media_type="application/json")

    return routes
