"""``/``: the page for chat and for watching the engine. The files are open; the routes that they call need a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Response

from qserve.runtime.server.service import Service

_FOLDER = Path(__file__).parents[1] / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS = {
    # Nothing from other origins and nothing inline, and text never becomes markup: what a model writes stays text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    for path in sorted(path for path in _FOLDER.iterdir() if path.suffix in _TYPES):
        # Each file is a route of its own and read once, so no name from a client becomes a path.
        send = _sender(path.read_bytes(), _TYPES[path.suffix])
        place = "/" if path.name == "index.html" else f"/static/{path.name}"
        routes.add_api_route(place, send, methods=["GET"], include_in_schema=False)
    return routes


def _sender(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
