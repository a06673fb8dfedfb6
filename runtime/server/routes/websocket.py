"""Completions over a WebSocket: the body of a request as a message, and each event of its answer as one.

A message is handed to the HTTP route of the same name, so that nothing it does, refuses or limits differs. An answer
ends with ``{"done": true}`` or with an error object; then the next message is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

from fastapi import APIRouter
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.body import parse_object
from qserve.runtime.server.service import Service

logger = logging.getLogger(__name__)

MAX_PENDING = 4  # messages that may wait for the answer before them
GOING_AWAY, UNSUPPORTED, POLICY = 1001, 1003, 1008  # RFC 6455, 7.4.1
_OF_THE_HANDSHAKE = (b"connection", b"upgrade", b"content-length", b"content-type", b"transfer-encoding", b"expect")


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.websocket("/v1/completions/ws")
    async def completions(websocket: WebSocket) -> None:
        await _Conversation(websocket, service, "/v1/completions").run()

    @routes.websocket("/v1/chat/completions/ws")
    async def chat_completions(websocket: WebSocket) -> None:
        await _Conversation(websocket, service, "/v1/chat/completions").run()

    return routes


class _Conversation:
    """One connection, from the handshake to its end."""

    def __init__(self, websocket: WebSocket, service: Service, path: str) -> None:
        self._websocket = websocket
        self._service = service
        self._path = path
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()  # None: there will be no more
        self._gone = asyncio.Event()

    async def run(self) -> None:
        await self._websocket.accept()
        reader = asyncio.create_task(self._read())
        try:
            while (text := await self._next()) is not None:
                await self._answer(text)
        finally:
            reader.cancel()

    async def _read(self) -> None:
        """Take what comes, also during an answer: that is how it is noticed that the client leaves."""
        while (message := await self._websocket.receive())["type"] == "websocket.receive":
            if message.get("text") is None:
                await self._close(UNSUPPORTED, "a request is a text message")
            elif self._inbox.qsize() == MAX_PENDING:
                await self._close(POLICY, f"more than {MAX_PENDING} requests wait for an answer")
            else:
                self._inbox.put_nowait(message["text"])
                continue
            break
        self._gone.set()
        self._inbox.put_nowait(None)

    async def _next(self) -> str | None:
        while not self._gone.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    return await self._inbox.get()
            if self._service.draining:
                await self._close(GOING_AWAY, "the server is shutting down")
                break
        return None

    async def _answer(self, text: str) -> None:
        try:
            content = parse_object(text.encode(), self._service.max_commas)
        except APIError as error:
            await self._send(error.body())
            return
        body = json.dumps({"stream": True} | content, ensure_ascii=False).encode()
        exchange = _Exchange(body, self._gone)
        call = asyncio.create_task(self._call(exchange))
        try:
            while (event := await exchange.events.get()) is not None:
                await self._send_text(event)
        finally:
            call.cancel()
        if exchange.succeeded:
            await self._send({"done": True})

    async def _call(self, exchange: _Exchange) -> None:
        outer = self._websocket.scope
        headers = [(name, value) for name, value in outer["headers"] if name not in _OF_THE_HANDSHAKE]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},  # before 2.4 a response watches for the client to leave
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https" if outer["scheme"] == "wss" else "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*headers, (b"content-type", b"application/json")],
            "client": outer.get("client"),
            "server": outer.get("server"),
        }
        try:
            await outer["app"](scope, exchange.receive, exchange.send)
        except Exception:  # the route has answered and said so in the log; the connection goes on
            logger.exception("a request over a WebSocket failed")
        await exchange.events.put(None)

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.close(code, reason)

    async def _send(self, content: dict[str, Any]) -> None:
        await self._send_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))

    async def _send_text(self, text: str) -> None:
        if not self._gone.is_set():
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # gone meanwhile, as ``_read`` will see
                await self._websocket.send_text(text)


class _Exchange:
    """One request as a route sees it, and its answer cut into messages.

    ``events`` ends with None. ``succeeded`` is false where the last of them is an error object.
    """

    def __init__(self, body: bytes, gone: asyncio.Event) -> None:
        self.events: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)  # a client that reads slowly slows the route
        self.succeeded = False
        self._body: bytes | None = body
        self._gone = gone
        self._whole = False
        self._status = 0
        self._rest = b""

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._whole = not any(kind.startswith(b"text/event-stream") for kind in kinds)
            return
        self._rest += message.get("body", b"")
        if self._whole:
            if not message.get("more_body"):
                self.succeeded = self._status < 400
                await self.events.put(self._rest.decode())
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self.succeeded = True
            elif event.startswith(b"data: "):
                await self.events.put(event[6:].decode())
