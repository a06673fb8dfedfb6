"""``ChatClient``: the chat API of any OpenAI-compatible server, streamed, with the times of each answer."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.checkpoint.extras import require

if TYPE_CHECKING:  # a package of the extra chat
    import httpx

_TIMEOUT, _READ_TIMEOUT = 30.0, 600.0  # seconds; a first token may be a long prompt away


def api_url(url: str) -> str:
    """The ``/v1`` of a server; a URL that has a path is used as it is. Raises ``UsageError``."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if not named or parts.query or parts.fragment:
        raise UsageError(f"a server is named like http://127.0.0.1:8000, not {url!r}")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


class Piece(NamedTuple):
    """A part of an answer, or of the reasoning before it that some servers split off."""

    text: str
    is_reasoning: bool


@dataclass
class Answer:
    """One answer as it comes. ``text`` excludes reasoning; ``tokens`` is None where the server does not count them.
    Times are seconds since the request."""

    text: str = ""
    tokens: int | None = None
    first: float | None = None
    last: float | None = None
    end: str | None = None

    def speed(self) -> str:
        """``TTFT 0.21 s, 34.5 tokens/s, 120 tokens``, as far as known."""
        parts = [] if self.first is None else [f"TTFT {self.first:.2f} s"]
        if self.tokens and self.tokens > 1 and self.first is not None and (self.last or 0) > self.first:
            parts.append(f"{(self.tokens - 1) / ((self.last or 0) - self.first):.1f} tokens/s")
        if self.tokens is not None:
            parts.append(f"{self.tokens} token{'s' * (self.tokens != 1)}")
        if self.end in ("stopped", "length"):
            parts.append("stopped" if self.end == "stopped" else "cut off at the limit of tokens")
        return ", ".join(parts)


class ChatClient:
    """The chat API of one server. Raises ``QServeError`` with the server's message, or the reason why there is none.

    ``options`` are fields of each request; with ``model`` None the server is asked which model it has.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, options: dict[str, Any]) -> None:
        require("httpx", "a conversation with a server")
        import httpx

        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        local = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
        # This machine is not behind the proxy that the environment may name.
        timeout = httpx.Timeout(_TIMEOUT, read=_READ_TIMEOUT)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=not local)
        self._url = url
        self._options = options
        try:
            self.model = model or self._first_model()
        except BaseException:
            self._http.close()
            raise

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def stream(self, messages: list[dict[str, str]], answer: Answer) -> Generator[Piece, None, None]:
        """The answer to ``messages``, piece by piece; ``answer`` is updated with each."""
        body = {"model": self.model, "messages": messages, "stream": True} | self._options
        began = time.monotonic()
        with (
            _failures(self._url),
            self._http.stream(
                "POST", "chat/completions", json=body | {"stream_options": {"include_usage": True}}
            ) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise QServeError(f"the server answered: {_reason(response)}")
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or not data:
                    continue
                if data == "[DONE]":
                    return
                for piece in _pieces(_object(data), answer):
                    answer.last = time.monotonic() - began
                    answer.first = answer.last if answer.first is None else answer.first
                    answer.text += "" if piece.is_reasoning else piece.text
                    yield piece
        if answer.end is None:
            raise QServeError("the server ended the connection within its answer")

    def _first_model(self) -> str:
        with _failures(self._url):
            response = self._http.get("models")
        if response.status_code != 200:
            raise QServeError(f"the server answered: {_reason(response)}")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise QServeError(f"{self._url} does not list a model; give one with --model") from None


@contextmanager
def _failures(url: str) -> Iterator[None]:
    """Turns transport errors into one line."""
    import httpx

    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise QServeError(f"{url}: {error or type(error).__name__}") from None
    except UnicodeEncodeError:
        raise QServeError("the message is not text: it holds half of a character") from None


def _object(data: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise QServeError(f"the server's stream holds what is no JSON object: {data[:80]!r}")
    return content


def _pieces(chunk: dict[str, Any], answer: Answer) -> Iterator[Piece]:
    """The texts in a chunk; notes its usage and finish reason."""
    try:
        if chunk.get("error"):
            raise QServeError(f"the server answered: {chunk['error']['message']}")
        if chunk.get("usage"):
            answer.tokens = int(chunk["usage"]["completion_tokens"])
        for choice in chunk.get("choices") or ():
            answer.end = choice.get("finish_reason") or answer.end
            for name in ("reasoning_content", "content"):
                if text := choice["delta"].get(name):
                    yield Piece(str(text), name != "content")
    except (LookupError, TypeError, AttributeError, ValueError):
        raise QServeError("the server's stream does not have the shape of a chat completion") from None


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"
