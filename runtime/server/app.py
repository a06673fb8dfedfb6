"""``create_app``: puts the routes of the server together; errors become the error object of the route's API."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from qserve.runtime.client.failures import EngineFailure
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.errors import APIError, ClientGone, as_api_error
from qserve.runtime.server.http.authentication import AuthenticationMiddleware
from qserve.runtime.server.http.browser_guard import BrowserGuard
from qserve.runtime.server.http.lingering_close import LingeringClose
from qserve.runtime.server.routes import (
    adapters,
    chat,
    classify,
    completions,
    embeddings,
    engine,
    messages,
    models,
    page,
    probes,
    responses,
    schema,
    scores,
    tokens,
    websocket,
)
from qserve.runtime.server.service import Service
from qserve.runtime.server.telemetry.access_log import AccessLogMiddleware


def create_app(service: Service) -> FastAPI:
    """The ASGI application. The caller starts and stops ``service.engine``."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(AuthenticationMiddleware, keys=service.keys)
    if not service.keys:
        app.add_middleware(
            BrowserGuard, allowed_hosts=service.config.allowed_hosts, origins=service.config.cors_origins
        )
    if service.config.cors_origins:  # outside of the guard: a browser asks without a key whether it may
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key", "X-Request-Id", "traceparent"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    app.add_middleware(AccessLogMiddleware, log=service.access_log)
    app.add_middleware(LingeringClose)  # added last, so outermost: the time it waits is not part of a request
    _add_error_handlers(app)
    api = (completions, chat, responses, messages, embeddings, scores, classify, tokens)
    for part in (probes, models, *api, adapters, websocket, engine, page, schema):
        app.include_router(part.router(service))
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(APIError)
    @app.exception_handler(RequestError)
    @app.exception_handler(EngineFailure)
    async def refused_or_failed(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path[:200]}"
        message = {404: f"there is no route {what}", 405: f"the method is not allowed: {what}"}
        status = error.status_code
        headers = dict(error.headers or {})
        return APIError(status, message.get(status, str(error.detail)), headers=headers).response(request.url.path)
