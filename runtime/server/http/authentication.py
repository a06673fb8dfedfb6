"""``AuthenticationMiddleware``: who may call. API keys on every route but the open ones, and a limit on headers.

It guards HTTP and WebSockets alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.checkpoint.errors import UsageError
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.refusal import refuse
from qserve.runtime.server.kv_order import KV_HEADER, KV_PATH, KvOrder
from qserve.runtime.server.limits.keys import CALLER, ApiKey, KeyRing, forwarded_caller

OPEN_PATHS = ("/health", "/ready", "/")
OPEN_PREFIX = "/static/"  # the shell of the page
MAX_HEADER_BYTES = 32 << 10


class AuthenticationMiddleware:
    """ASGI middleware. With no keys everybody may call.

    ``scope["qserve.key"]`` tells later parts whose call it is, None where no key is needed;
    ``scope["qserve.tenant"]`` is the name of that key, or an empty string. ``scope["qserve.kv"]`` is what a router asks
    of the KV cache, where it does.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            key = scope["qserve.key"] if "qserve.key" in scope else self._admit(scope)  # of a batch, which had its key
        except APIError as error:
            await refuse(error, scope, receive, send)
            return
        scope["qserve.key"], scope["qserve.tenant"] = key, key.name if key else ""
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> ApiKey | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise APIError(431, f"the request headers have more than {MAX_HEADER_BYTES:,} bytes")
        if scope["type"] == "http" and is_open(scope["path"]):
            return None
        given = dict(reversed(headers))
        if scope["type"] == "http" and scope["path"] == KV_PATH:
            self._check_ticket(given)
            return None
        if (order := given.get(KV_HEADER.encode())) is not None and self._keys and _presented(self._keys, given).router:
            scope["qserve.kv"] = _kv_order(order)
        return authenticate(self._keys, headers)

    def _check_ticket(self, given: dict[bytes, bytes]) -> None:
        """No caller may read KV blocks, and nobody where there are no keys of routers."""
        ticket = given.get(b"authorization", b"").removeprefix(b"Bearer ").decode("latin-1")
        if not self._keys.admits(ticket, time.time()):
            raise APIError(401, "KV blocks are for replicas that a router has given a ticket", code="invalid_ticket")


def _kv_order(value: bytes) -> KvOrder:
    try:
        return KvOrder.of(value)
    except UsageError as error:
        raise APIError(400, str(error), code="invalid_kv_order") from None


def authenticate(keys: KeyRing, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
    """Whose call it is; None where there are no keys. Raises ``APIError`` 400 or 401.

    Who says for whom it asks is believed where it is the key of a router, or where everybody may do everything.
    """
    given = dict(reversed(list(headers)))  # of headers that come twice the first counts
    key = _presented(keys, given) if keys else None
    caller = given.get(CALLER.encode())
    if caller is None or (key is not None and not key.router):
        return key
    try:
        return forwarded_caller(caller)
    except UsageError as error:
        raise APIError(400, str(error), code="invalid_caller") from None


def _presented(keys: KeyRing, given: dict[bytes, bytes]) -> ApiKey:
    scheme, _, bearer = given.get(b"authorization", b"").partition(b" ")
    key = keys.find(bearer.strip()) if scheme.lower() == b"bearer" else None
    key = key or keys.find(given.get(b"x-api-key", b""))
    if key is None:
        raise APIError(
            401,
            "no valid API key was given; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key


def require_admin(request: Request) -> None:
    """Raise ``APIError`` 403 where a key may not see or change what all keys have. Without keys everybody is an
    admin."""
    key: ApiKey | None = request.scope["qserve.key"]
    if key is not None and not (key.admin or key.router):
        raise APIError(
            403,
            "this is of all callers; in the file of API keys, 'admin = true' lets a key have it",
            code="admin_only",
        )


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or (path.startswith(OPEN_PREFIX) and ".." not in path)
