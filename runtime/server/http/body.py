"""Reading a request's body: bounded in bytes and time, and strict JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from qserve.runtime.server.errors import APIError, ClientGone
from qserve.runtime.server.limits.shared_pool import SharedPool

MAX_OBJECTS = 50_000
MORE_COMMAS = 20_000  # in a body, besides those between tokens
MAX_COMMAS = 400_000  # so many stop every stream for a tenth of a second; a context that is longer may have more
MAX_DEPTH = 64

# Escapes that no text can hold. Escaped backslashes must be removed before the search.
_BAD_ESCAPE = re.compile(
    rb"\\u(?:(?P<nul>0000)"
    rb"|[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"  # a high surrogate without a low one
    rb"|(?<!\\u[dD][89abAB]..\\u)[dD][c-fC-F])"  # a low surrogate without a high one
)


async def read_json(
    request: Request, uploads: SharedPool, *, max_bytes: int, max_commas: int, timeout: float
) -> dict[str, Any]:
    """The body as a JSON object. Raises ``APIError`` 400, and what ``read_body`` raises."""
    return parse_object(await read_body(request, uploads, max_bytes=max_bytes, timeout=timeout), max_commas)


async def read_body(request: Request, uploads: SharedPool, *, max_bytes: int, timeout: float) -> bytes:
    """A body that says it is JSON. ``uploads`` are the bytes of all bodies that are arriving.

    Raises ``APIError`` 408 (not here in ``timeout`` seconds), 413, 415 or 503.
    """
    _require_json(request.headers.get("content-type", ""))
    body = bytearray()
    tenant: str = request.scope["qserve.tenant"]
    try:
        async with asyncio.timeout(timeout):
            async for chunk in _chunks(request, max_bytes):
                if not uploads.take(tenant, len(chunk)):
                    raise too_many_uploads()
                body += chunk
        return bytes(body)
    except TimeoutError:
        raise APIError(408, f"the request body did not arrive within {timeout:g} seconds") from None
    finally:
        uploads.give_back(tenant, len(body))


def too_many_uploads() -> APIError:
    return APIError(
        503, "too many request bodies are arriving at once; send it again", code="uploads_full",
        headers={"Retry-After": "1"},
    )  # fmt: skip


def _require_json(content_type: str) -> None:
    """A page of any origin may post text, forms and bytes without asking the server; JSON it may not."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise APIError(415, "the request body must be sent as 'Content-Type: application/json'", code="not_json")


async def _chunks(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    too_large = APIError(413, f"the request body has more than {max_bytes:,} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large
    arrived = 0
    try:
        async for chunk in request.stream():
            arrived += len(chunk)
            if arrived > max_bytes:
                raise too_large
            yield chunk
    except ClientDisconnect:
        raise ClientGone from None


def parse_object(body: bytes, max_commas: int | None = None) -> dict[str, Any]:
    """Strict JSON: no NaN, duplicate keys, lone surrogates, NUL or deep nesting. Raises ``APIError`` 400.

    While a body is parsed no other thread of Python runs, and a million numbers would hold up every stream for a
    quarter of a second. So commas are counted first, which is quick; those inside strings count too.
    """
    if max_commas is not None and body.count(b",") > max_commas:
        # Not 413, which is about bytes: such a body may be small, but it asks for too much.
        raise APIError(400, f"the request body holds more than {max_commas:,} values", code="too_many_values")
    if b"\\u" in body and (bad := _BAD_ESCAPE.search(body.replace(rb"\\", b"__"))):
        raise _refuse("holds a NUL character" if bad["nul"] else "holds half of a surrogate pair")
    objects = 0

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal objects
        objects += 1
        if objects > MAX_OBJECTS:
            raise _refuse(f"holds more than {MAX_OBJECTS:,} objects")
        content = dict(pairs)
        if len(content) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise _refuse(f"holds the key {twice!r:.80} twice")
        return content

    def constant(name: str) -> NoReturn:
        raise _refuse(f"holds {name}, which is no JSON number")

    try:
        content = json.loads(body.decode(), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError:
        raise _refuse("is not valid UTF-8") from None
    except RecursionError:
        raise _refuse("is nested too deeply") from None
    except ValueError as error:  # also a number of more digits than Python converts
        raise _refuse(f"is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise _refuse("must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:  # to look at a million tokens takes long
        _check_depth(content)
    return content


def _check_depth(content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list) and item
        ]
        if not level:
            return
    raise _refuse("is nested too deeply")


def _refuse(what: str) -> APIError:
    return APIError(400, f"the request body {what}", code="invalid_json")
