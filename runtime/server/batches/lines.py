"""``Line``: one request of a batch file, in OpenAI's format, and the reading of such files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import DataError
from qserve.runtime.server.batches.answer_file import ID, Key, key_of
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.body import parse_object

MAX_LINE = 9 << 20  # bytes: the largest body that the server takes, and room for the rest of the line
MAX_CUSTOM_ID = 512
_FIELDS = {"custom_id", "method", "url", "body"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One request of a batch. ``problem`` says why it is invalid; then ``url`` and ``body`` mean nothing."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    problem: str | None = None

    @property
    def id(self) -> str:
        return f"{ID}{self.number:08d}"

    def answer(self, response: Json | None, error: Json | None = None) -> Json:
        return {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}

    @property
    def key(self) -> Key:
        """The key under which its answer is found."""
        return key_of(self.answer(None))


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of IN without blank lines. A line that is no request has a ``problem``."""
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(MAX_LINE):
                number += 1
                long = len(text) == MAX_LINE and not text.endswith(b"\n")
                while long and (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                    pass
                if long:
                    yield Line(number, problem=f"the line has more than {MAX_LINE:,} bytes")
                elif text.strip():
                    yield _parse(number, text)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _parse(number: int, text: bytes) -> Line:
    try:
        content = parse_object(text)
    except APIError as error:
        return Line(number, problem=str(error).replace("the request body", f"line {number}"))
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        return Line(number, problem=f"line {number} needs a custom_id: a string of 1 to {MAX_CUSTOM_ID} characters")
    problem = _problem(content)
    if problem is not None:
        return Line(number, custom_id, problem=f"line {number}: {problem}")
    return Line(number, custom_id, content["url"], json.dumps(content["body"]).encode())


def _problem(content: Json) -> str | None:
    if unknown := sorted(content.keys() - _FIELDS):
        return f"unknown field {unknown[0]!r:.80}"
    if content.get("method") != "POST":
        return "method must be POST"
    url = content.get("url")
    if not isinstance(url, str) or not url.startswith("/v1/") or not url.isascii():
        return "url must be that of a route, as /v1/chat/completions"
    if not isinstance(content.get("body"), dict):
        return "body must be an object"
    if content["body"].get("stream"):
        return "stream is not for batches: leave it out"
    return None
