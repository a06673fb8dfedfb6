"""``/health``, ``/ready`` and ``/metrics``, for orchestrators and dashboards."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        alive = service.engine.alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @routes.get("/ready")
    async def ready() -> Response:
        state = "ready" if service.ready else "draining" if service.draining else "failed"
        return JSONResponse({"status": state}, 200 if service.ready else 503)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        require_admin(request)
        engine = service.engine
        content = service.metrics.render(
            engine.stats, up=engine.alive, ready=service.ready, step_age=engine.step_seconds()
        )
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes
