"""``ask``: one HTTP request and all of its times. A client so small that it is not measured itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TIMEOUT = 120.0  # seconds after which a request counts as hanging

Json = dict[str, Any]
End = Literal["done", "refused", "error", "truncated", "aborted", "hung", "unreachable"]


@dataclass
class Outcome:
    """What came of a request. Times are ``time.monotonic`` seconds.

    ``end``: done (complete), refused (a 4xx or 5xx status), error (an error event in the stream), truncated (the
    connection ended first), aborted (by us), hung, or unreachable (no connection).
    """

    began: float
    end: End = "truncated"
    status: int = 0
    ended: float = 0.0
    tokens: list[float] = field(default_factory=list)  # when each chunk with text came, or the only one without
    retry_after: str | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def ttft(self) -> float | None:
        return self.tokens[0] - self.began if self.tokens else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:])]


@dataclass(frozen=True)
class Client:
    """Where the server is, and the key to show."""

    host: str
    port: int
    key: str | None = None

    async def ask(
        self,
        body: Json | bytes,
        path: str = "/v1/completions",
        *,
        abort_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        chunked: bool = False,
    ) -> Outcome:
        """Send a request and follow it to its end, or leave after ``abort_after`` seconds. Raises nothing.

        ``headers`` take the place of the client's own; ``chunked`` sends the body without its length.
        """
        outcome = Outcome(time.monotonic())
        try:
            async with asyncio.timeout(TIMEOUT if abort_after is None else abort_after):
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                await self._exchange(self._request(path, headers or {}, content, chunked), outcome)
        except TimeoutError:
            outcome.end = "hung" if abort_after is None else "aborted"
        except (OSError, EOFError):
            outcome.end = "truncated" if outcome.status else "unreachable"
        outcome.ended = time.monotonic()
        return outcome

    def _request(self, path: str, headers: Mapping[str, str], body: bytes, chunked: bool) -> bytes:
        length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
        own = {"Host": self.host, "Connection": "close", "Content-Type": "application/json"} | length
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**own, **key, **headers}.items())]
        content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + content

    async def _exchange(self, request: bytes, outcome: Outcome) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(request)
            with contextlib.suppress(ConnectionError):  # refused before it was read: the answer is there all the same
                await writer.drain()
            await self._follow(reader, outcome)
        finally:
            writer.close()

    async def _follow(self, reader: asyncio.StreamReader, outcome: Outcome) -> None:
        first = (await reader.readline()).split()
        if len(first) < 2:
            return
        outcome.status = int(first[1])
        length, events = None, False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            match name.lower():
                case "content-length":
                    length = int(value)
                case "retry-after":
                    outcome.retry_after = value.strip()
                case "content-type":
                    events = "event-stream" in value
        if not events:
            whole = await reader.read() if length is None else await reader.readexactly(length)
            complete = length is None or len(whole) == length
            outcome.end = "refused" if outcome.status >= 400 else "done" if complete else "truncated"
            return
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                outcome.end = "done"
            elif line.startswith(b'data: {"error"'):
                outcome.end = "error"
            elif line.startswith(b"data: ") and (b'"finish_reason":null' in line or not outcome.tokens):
                outcome.tokens.append(time.monotonic())


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
