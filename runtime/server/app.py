"""``create_app``: puts the routes of the server together; errors become the error object of the route's API."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from qserve.runtime.server.batches.runner import BatchRunner
from qserve.runtime.server.http.authentication import AuthenticationMiddleware
from qserve.runtime.server.http.browser_guard import BrowserGuard
from qserve.runtime.server.http.error_handlers import add_error_handlers
from qserve.runtime.server.http.lingering_close import LingeringClose
from qserve.runtime.server.routes import (
    adapters,
    batches,
    chat,
    classify,
    completions,
    embeddings,
    engine,
    kv_blocks,
    messages,
    models,
    page,
    prefixes,
    probes,
    responses,
    schema,
    scores,
    tokens,
    usage,
    websocket,
)
from qserve.runtime.server.service import Service
from qserve.runtime.server.telemetry.access_log import AccessLogMiddleware


def create_app(service: Service, runner: BatchRunner | None = None) -> FastAPI:
    """The ASGI application. The caller starts and stops ``service.engine``, and ``runner``, which answers batches."""
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
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key", "X-Request-Id", "traceparent"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    app.add_middleware(AccessLogMiddleware, log=service.access_log)
    app.add_middleware(LingeringClose)  # added last, so outermost: the time it waits is not part of a request
    add_error_handlers(app)
    api = (completions, chat, responses, messages, embeddings, scores, classify, tokens)
    for part in (probes, models, *api, adapters, websocket, engine, usage, prefixes, kv_blocks, page, schema):
        app.include_router(part.router(service))
    app.include_router(batches.router(runner))
    return app
