"""Completions over a WebSocket: the body of a request as a message, and each event of its answer as one.

A message begins the same reply as a request to the HTTP route of the same path, with the same checks and limits. An
answer ends with ``{"done": true}`` or with an error object; then the next message is taken.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from qserve.runtime.server.errors import as_api_error
from qserve.runtime.server.http.authentication import authenticate
from qserve.runtime.server.http.body import parse_object, too_many_uploads
from qserve.runtime.server.http.json_writer import compact_json
from qserve.runtime.server.http.refusal import refuse
from qserve.runtime.server.reply import Call, Reply
from qserve.runtime.server.routes import chat, completions
from qserve.runtime.server.service import Begin, Service
from qserve.runtime.server.telemetry.request_record import RequestRecord

MAX_PENDING = 4  # messages that may wait for the answer before them
GOING_AWAY, UNSUPPORTED, POLICY, TRY_AGAIN_LATER = 1001, 1003, 1008, 1013  # the registry of RFC 6455, 11.7


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.websocket("/v1/completions/ws")
    async def completion_socket(websocket: WebSocket) -> None:
        await _Session(websocket, service, "/v1/completions", completions.begin).run()

    @routes.websocket("/v1/chat/completions/ws")
    async def chat_socket(websocket: WebSocket) -> None:
        await _Session(websocket, service, "/v1/chat/completions", chat.begin).run()

    return routes


class _Session:
    """One connection, from the handshake to its end."""

    def __init__(self, websocket: WebSocket, service: Service, path: str, begin: Begin) -> None:
        """``path``: the HTTP route that ``begin`` belongs to, as the log and the traces call it."""
        self._websocket = websocket
        self._service = service
        self._path = path
        self._begin = begin
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()  # None: there will be no more
        self._gone = asyncio.Event()
        self._held = 0  # bytes of messages that wait, and of the one that may be arriving
        self._tenant: str = websocket.scope["qserve.tenant"]

    async def run(self) -> None:
        if not self._take(self._service.config.max_message_bytes):
            scope = self._websocket.scope
            await refuse(too_many_uploads(), scope, self._websocket.receive, self._websocket.send)
            return
        try:
            await self._run()
        finally:
            self._service.uploads.give_back(self._tenant, self._held)

    def _take(self, count: int) -> bool:
        taken = self._service.uploads.take(self._tenant, count)
        self._held += count * taken
        return taken

    async def _run(self) -> None:
        await self._websocket.accept()
        reader, ender = asyncio.create_task(self._read()), asyncio.create_task(self._end_with_server())
        try:
            while not self._gone.is_set() and (text := await self._inbox.get()) is not None:
                self._service.uploads.give_back(self._tenant, len(text))
                self._held -= len(text)
                await self._answer(text)
            if not self._gone.is_set():
                await self._close(GOING_AWAY, "the server is shutting down")
        finally:
            for task in (reader, ender):
                task.cancel()

    async def _read(self) -> None:
        """Take messages even during an answer: that is how a client that leaves is noticed."""
        while (message := await self._websocket.receive())["type"] == "websocket.receive":
            if message.get("text") is None:
                await self._close(UNSUPPORTED, "a request is a text message")
            elif self._inbox.qsize() >= MAX_PENDING:
                await self._close(POLICY, f"more than {MAX_PENDING} requests wait for an answer")
            elif not self._take(len(message["text"])):
                await self._close(TRY_AGAIN_LATER, "too many requests are arriving at once")
            else:
                self._inbox.put_nowait(message["text"])
                continue
            break
        self._gone.set()
        self._inbox.put_nowait(None)

    async def _end_with_server(self) -> None:
        await self._service.closing.wait()
        self._inbox.put_nowait(None)

    async def _answer(self, text: str) -> None:
        answering, gone = asyncio.create_task(self._reply(text)), asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    async def _reply(self, text: str) -> None:
        """One request: checked, logged and limited like one over HTTP."""
        service, headers = self._service, self._websocket.scope["headers"]
        with service.access_log.request("POST", dict(headers)) as record:
            record.route = self._path
            try:
                key = authenticate(service.keys, headers)
                call = Call(key, record)
                record.tenant = call.tenant
                service.admit(call)
                content = parse_object(text.encode(), service.max_commas)
                reply = await self._begin(service, call, {"stream": True} | content)
                try:
                    await self._send_all(record, reply)
                finally:
                    service.engine.abort(reply.generation)
            except Exception as error:  # only this request fails; the connection goes on
                refused = as_api_error(error)
                record.status = record.status or refused.status
                await self._send(compact_json(refused.body()))

    async def _send_all(self, record: RequestRecord, reply: Reply) -> None:
        if reply.streamed:
            async for chunk in reply.chunks():
                record.status = 200
                await self._send(compact_json(chunk))
        else:
            whole = await reply.whole()
            record.status = 200
            await self._send(await self._service.writer.text(whole))
        await self._send(compact_json({"done": True}))

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.close(code, reason)

    async def _send(self, text: str) -> None:
        if not self._gone.is_set():
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # gone meanwhile, as ``_read`` will see
                await self._websocket.send_text(text)
