"""``BrowserGuard``: a web page may not use a server without keys that its reader's browser happens to reach.

It checks what a browser cannot be made to lie about: ``Host``, where a page had a name of its own resolve to this
machine (DNS rebinding), and ``Origin``, where it calls a server that is not its own. Does not know keys or routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.authentication import is_open
from qserve.runtime.server.http.refusal import refuse


class BrowserGuard:
    """ASGI middleware. ``allowed_hosts``: names besides ``localhost``; ``origins``: as for CORS.

    Addresses are allowed as ``Host``: no page can make one its own. Programs that are no browsers send no ``Origin``.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in allowed_hosts)}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "websocket" or (scope["type"] == "http" and not is_open(scope["path"]))
        if guarded and (error := self._why_not(Headers(scope=scope))) is not None:
            await refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_not(self, headers: Headers) -> APIError | None:
        host, origin = headers.get("host"), headers.get("origin")
        name = None if host is None else _hostname(f"//{host}")
        if name is not None and name not in self._names and not _is_address(name):
            return APIError(
                403,
                f"without API keys this server answers to localhost, to addresses and to --allowed-hosts, not to "
                f"{name!r:.100}",
                code="host_not_allowed",
            )
        if origin is None or self._origins & {"*", origin} or origin.partition("://")[2] == host:
            return None
        caller = _hostname(origin)
        if caller in self._names or _is_loopback(caller):
            return None
        return APIError(
            403,
            f"without API keys pages of {origin!r:.100} may not call this server; --cors-origin allows them",
            code="origin_not_allowed",
        )


def _hostname(url: str) -> str:
    """The host that ``url`` names, in lower case; empty where it names none."""
    with suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(name))
    return False


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ip_address(name).is_loopback
