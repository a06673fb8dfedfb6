"""``add_error_handlers``: what an application of FastAPI raises becomes the error object of the route's API."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from qserve.runtime.client.failures import EngineFailure
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.errors import APIError, ClientGone, as_api_error


def add_error_handlers(app: FastAPI) -> None:
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
