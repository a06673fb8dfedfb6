"""``Guard``: who may call. API keys on every route but the open ones, and a limit on headers.

Knows keys as hashes and the ASGI interface; does not know routes or bodies.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.runtime.server.errors import APIError

OPEN_PATHS = ("/health", "/ready")
MAX_HEADER_BYTES = 32 << 10


class Guard:
    """ASGI middleware. With no keys everybody may call.

    ``scope["qserve.tenant"]`` tells later parts whose call it is: a hash of the key, or an empty string.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # a refused WebSocket is answered like a request
            await self._app(scope, receive, send)
            return
        try:
            scope["qserve.tenant"] = self._admit(scope)
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> str:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise APIError(431, f"the request headers have more than {MAX_HEADER_BYTES:,} bytes")
        if not self._digests or scope["path"] in OPEN_PATHS:
            return ""
        authorization = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = authorization.partition(b" ")
        digest = sha256(key.strip()).digest()
        # Every key is compared, in constant time: the time says nothing about which or how nearly.
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            raise APIError(
                401,
                "no valid API key was given; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest.hex()
