"""``receive_file``: a file that arrives as ``multipart/form-data``, written to the store's disk as it comes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from qserve.runtime.server.batches.records import StoredFile
from qserve.runtime.server.batches.store import BatchStore, Room
from qserve.runtime.server.errors import APIError, ClientGone

MAX_FILE = 200 << 20  # bytes, as OpenAI's input files of batches
MAX_FIELD = 4096
MAX_PARTS = 16
TIMEOUT = 600.0  # seconds in which it has arrived


@dataclass
class _Form:
    """The callbacks of the parser. ``fields`` are small; the part ``file`` goes to ``out``."""

    out: BinaryIO
    fields: dict[str, bytearray] = field(default_factory=dict)
    filename: str | None = None
    _headers: dict[str, bytearray] = field(default_factory=dict)
    _header: bytearray = field(default_factory=bytearray)
    _name: str = ""
    _parts: int = 0

    def begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise APIError(400, f"the form has more than {MAX_PARTS} parts")
        self._headers, self._header, self._name = {}, bytearray(), ""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._headers.setdefault(self._header.decode("latin-1").lower(), bytearray()).extend(data[start:end])

    def header_end(self) -> None:
        self._header = bytearray()

    def headers_finished(self) -> None:
        _, options = parse_options_header(bytes(self._headers.get("content-disposition", b"")))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name in self.fields or (self._name == "file" and self.filename is not None):
            raise APIError(400, f"the form has {self._name!r:.80} twice", param=self._name[:80])
        if self._name == "file":
            self.filename = options.get(b"filename", b"").decode(errors="replace")[-200:] or "file"
        else:
            self.fields[self._name] = bytearray()

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.out.write(data[start:end])
            return
        content = self.fields[self._name]
        content += data[start:end]
        if len(content) > MAX_FIELD:
            raise APIError(400, f"a field of the form has more than {MAX_FIELD} bytes", param=self._name[:80])

    def field(self, name: str) -> str | None:
        content = self.fields.get(name)
        return None if content is None else content.decode(errors="replace")


async def receive_file(request: Request, store: BatchStore, owner: str) -> StoredFile:
    """Raises ``APIError`` for what is no such form, too large, too slow, or finds no room."""
    store.check_count(owner)
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise APIError(415, "a file is sent as multipart/form-data, with the fields file and purpose", code="no_form")
    path = store.new_path()
    room = Room(store, owner)
    try:
        with path.open("xb") as out:
            form = await _received(request, options[b"boundary"], out, room)
        purpose = form.field("purpose")
        if purpose != "batch":
            raise APIError(400, f"purpose must be batch, not {purpose!r:.80}", param="purpose")
        if form.filename is None:
            raise APIError(400, "the form has no part file with a file name", param="file")
        room.keep(path.stat().st_size)
        return store.add_file(path, owner, form.filename, purpose)
    except OSError as error:
        raise APIError(503, f"the file cannot be stored: {error.strerror}", code="no_room") from None
    finally:
        room.close()
        path.unlink(missing_ok=True)


async def _received(request: Request, boundary: bytes, out: BinaryIO, room: Room) -> _Form:
    form = _Form(out)
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.begin,
            "on_header_field": form.header_field,
            "on_header_value": form.header_value,
            "on_header_end": form.header_end,
            "on_headers_finished": form.headers_finished,
            "on_part_data": form.data,
        },
    )
    arrived = 0
    try:
        async with asyncio.timeout(TIMEOUT):
            async for chunk in request.stream():
                arrived += len(chunk)
                if arrived > MAX_FILE + MAX_PARTS * MAX_FIELD:
                    raise APIError(413, f"a file has {MAX_FILE:,} bytes at most", code="request_too_large")
                room.take(len(chunk))
                parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        raise APIError(400, f"the form cannot be read: {error}", code="invalid_form") from None
    except TimeoutError:
        raise APIError(408, f"the file did not arrive within {TIMEOUT:g} seconds") from None
    except ClientDisconnect:
        raise ClientGone from None
    return form
