"""``/openapi.json``: this server's interface, for tools that generate clients or try to break servers."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from qserve.runtime.server.openai.openapi import document
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    made: list[bytes] = []

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        if not made:  # at the first call every route exists
            made.append(json.dumps(document(request.app.routes, service.model_names)).encode())
        return Response(made[0], media_type="application/json")

    return routes
