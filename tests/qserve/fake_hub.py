"""A hub on this machine: the few routes of the Hugging Face hub that fetching a model needs, served from a directory.

``FakeHub(root)`` serves ``root/ORG/NAME/FILE``; ``damage`` and ``cut`` make it answer as a bad network would.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT_COMMIT = COMMIT[::-1]
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


class FakeHub:
    """A context manager. ``served`` are the names of the files whose bytes were sent whole."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.revisions = {"main", "v1", COMMIT, NEXT_COMMIT}
        self.commit = COMMIT  # which main and v1 are
        self.served: list[str] = []
        self.damage: Callable[[str, bytes], bytes] = lambda name, content: content
        self.cut: str | None = None  # of this file only the half comes, once
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) == 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], parts[4])
        else:
            self._refuse("EntryNotFound")

    def _api(self, model: str, rest: list[str]) -> None:
        folder = self.hub.root / model
        revision = rest[1] if len(rest) > 1 else "main"
        if not folder.is_dir():
            return self._refuse("RepoNotFound")
        if revision not in self.hub.revisions:
            return self._refuse("RevisionNotFound")
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if rest[:1] == ["tree"]:
            return self._json([{"type": "file", "path": path.name, **_entry(path)[1]} for path in files])
        siblings = []
        for path in files:
            blob, entry = _entry(path)
            siblings.append({"rfilename": path.name, "blobId": blob, **entry})
        commit = self._commit(revision)
        self._json({"id": model, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def _commit(self, revision: str) -> str:
        return revision if revision in (COMMIT, NEXT_COMMIT) else self.hub.commit

    def _file(self, model: str, revision: str, name: str) -> None:
        path = self.hub.root / model / name
        if not path.is_file():
            return self._refuse("EntryNotFound")
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest() if name.endswith(LFS_SUFFIXES) else _git_hash(content)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        body = self.hub.damage(name, content)[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", self._commit(revision))
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut == name:
            self.hub.cut = None
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)
        self.hub.served.append(name)

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(path: Path) -> tuple[str, dict[str, object]]:
    """The git hash, and what the hub says of the size and, for a large file, the SHA-256."""
    content = path.read_bytes()
    if path.name.endswith(LFS_SUFFIXES):
        sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        lfs = {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": len(pointer)}
        return _git_hash(pointer), {"oid": _git_hash(pointer), "size": len(content), "lfs": lfs}
    return _git_hash(content), {"oid": _git_hash(content), "size": len(content)}
