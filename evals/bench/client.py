"""``Client``: completions and chats of any OpenAI-compatible server, streamed, each with its times and its counts."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from qserve.checkpoint.errors import QServeError
from qserve.evals.bench.connection import Connection
from qserve.runtime.fleet.http_client import BadResponse

Json = dict[str, Any]
End = Literal["done", "refused", "error", "truncated", "timeout", "unreachable"]
Endpoint = Literal["completions", "chat"]

CONNECT_TIMEOUT = 20.0


@dataclass
class Answer:
    """The result of a request. Times are ``time.perf_counter`` seconds.

    Attributes:
        end: done, refused (a status of 400 or more), error (an error event in the stream), truncated (the connection
            ended first, or the response is no stream of completions), timeout, or unreachable (no connection).
        reason: for an end other than done, the server's message.
        sent: the time of the request.
        times: the times of the events with text.
        last: the time of the last event with a choice. It may hold no text, for example half a character.
        tokens, prompt_tokens, cached_tokens: as the server counts them; None where it does not.
    """

    sent: float = 0.0
    end: End = "truncated"
    status: int = 0
    reason: str = ""
    times: list[float] = field(default_factory=list)
    last: float = 0.0
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""


class NotListed(QServeError):
    """A server does not say which models it has; it may answer all the same."""


class Client:
    """One server. ``url`` ends with its version, as ``http://127.0.0.1:8000/v1``; ``timeout``: seconds of a request."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host, self._secure = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/")
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept-Encoding: identity\r\n{key}"
        if not self._head.isprintable() and not self._head.replace("\r\n", "").isprintable():
            raise QServeError("the API key holds a character that no header may hold")
        self._tls = ssl.create_default_context() if self._secure else None
        self._timeout = timeout
        self._idle: list[Connection] = []

    async def stream(self, body: Json, endpoint: Endpoint) -> Answer:
        """Send a request and follow the answer to its end. Raises nothing but ``CancelledError``."""
        path = "/chat/completions" if endpoint == "chat" else "/completions"
        content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        answer = Answer(time.perf_counter())

        def event(data: bytes, now: float) -> None:
            if data == b"[DONE]":
                if answer.end == "truncated":
                    answer.end = "done"
                return
            try:
                _read(json.loads(data), answer, now)
            except (LookupError, TypeError, ValueError, AttributeError):
                raise BadResponse("the stream does not have the shape of completions") from None

        await self._ask("POST", path, content, event, answer)
        return answer

    async def models(self) -> list[Json]:
        """The models that the server lists. Raises ``QServeError``, in one line, where it cannot be asked, and
        ``NotListed`` where it does not say."""
        answer = Answer()
        body = await self._ask("GET", "/models", b"", lambda data, now: None, answer)
        if answer.end == "refused" and answer.status != 404:
            raise QServeError(f"{self.url} answered {answer.status}: {answer.reason}")
        if answer.end == "unreachable":
            raise QServeError(f"{self.url} cannot be reached: {answer.reason}")
        if not answer.status:
            raise QServeError(f"{self.url} does not answer: {answer.reason}")
        try:
            found = json.loads(body)["data"]
            return [each for each in found if isinstance(each["id"], str)]
        except (ValueError, LookupError, TypeError):
            raise NotListed(f"{self.url} does not list its models as OpenAI's API does; is it one?") from None

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle.clear()

    async def _ask(self, method: str, path: str, content: bytes, event: Any, answer: Answer) -> bytes:
        """Returns the body of a response that is no stream. Errors are noted in ``answer``."""
        length = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if content else ""
        request = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode("latin-1") + content
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._exchange(request, event)
        except TimeoutError:
            answer.end, answer.reason = "timeout", f"no end after {self._timeout:g} s"
            return b""
        except _Unreachable as error:
            answer.end, answer.reason = "unreachable", str(error)
            return b""
        except (OSError, BadResponse) as error:
            answer.end, answer.reason = "truncated", str(error)
            return b""
        answer.status, body = connection.status, bytes(connection.body)
        if answer.status >= 400:
            answer.end, answer.reason = "refused", _reason(body)
        elif answer.end == "truncated":
            answer.reason = "the stream has no end" if answer.times else "the answer is no stream"
        if connection.reusable and connection.is_open:
            self._idle.append(connection)
        elif connection.transport is not None:
            connection.transport.close()
        return body

    async def _exchange(self, request: bytes, event: Any) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    await connection.exchange(request, event)
                    return connection
                except ConnectionError:
                    if connection.status:
                        raise
                    # The server had closed the idle connection: nothing of the request was read.
        connection = await self._connect()
        await connection.exchange(request, event)
        return connection

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                transport, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise _Unreachable(f"no connection within {CONNECT_TIMEOUT:g} s") from None
        except (OSError, UnicodeError) as error:
            raise _Unreachable(_why(error)) from None
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class _Unreachable(Exception):
    pass


def _read(chunk: Json, answer: Answer, now: float) -> None:
    """Note the text, the counts or the error of one event."""
    if error := chunk.get("error"):
        answer.end, answer.reason = "error", str(error["message"] if isinstance(error, dict) else error)
        return
    if usage := chunk.get("usage"):
        answer.tokens, answer.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
        if details := usage.get("prompt_tokens_details"):
            answer.cached_tokens = details.get("cached_tokens")
    for choice in chunk.get("choices") or ():
        part = choice.get("delta") or choice
        text = part.get("content") or part.get("text") or part.get("reasoning_content") or part.get("reasoning")
        if text:
            answer.times.append(now)
            answer.text += text
        if text or choice.get("finish_reason"):
            answer.last = now


def _reason(body: bytes) -> str:
    try:
        content = json.loads(body)
        error = content.get("error", content)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, AttributeError):
        text = body.decode("utf-8", "replace").strip() or "without a word"
    return " ".join(text.split())[:300]


def _why(error: Exception) -> str:
    """The message without the addresses and numbers that asyncio puts around it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__
