"""``fetch_bucket``: checkpoints that qserve wrote, from ``s3://`` and ``gs://``, in a cache that all processes share.

What is fetched is what ``manifest.json`` says, by hash. A copy appears in the cache complete or not at all, under the
hash of its manifest and quality card, so that a checkpoint which changes in the bucket is another one here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from qserve.checkpoint.cache_dir import cache_dir
from qserve.checkpoint.card import CARD_FILE
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.extras import require
from qserve.checkpoint.files import file_sha256, read_json_object, sync, write_atomically
from qserve.checkpoint.hub import PATTERNS
from qserve.checkpoint.manifest import MANIFEST, FileEntry, parse_manifest

SCHEMES = {"s3": "s3fs", "gs": "gcsfs"}
"""What a URL begins with, and the package that reads there."""
CACHE_SHARE = 0.8  # of what the cache has and the disk has free
MAX_SMALL = 64 << 20  # bytes of a manifest or a card
CHUNK = 16 << 20

Progress = Callable[[int, int], None]

_in_use: list[TextIO] = []  # locks of the copies that this process has opened, until it ends


def is_bucket_url(text: str) -> bool:
    scheme, separator, rest = text.partition("://")
    return scheme in SCHEMES and bool(separator) and bool(rest.strip("/"))


@dataclass(frozen=True)
class Fetched:
    """``path``: the directory of the copy, ``came``: bytes that were fetched for it."""

    path: Path
    bytes: int
    came: int


def fetch_bucket(url: str, progress: Progress = lambda done, total: None, *, offline: bool = False) -> Fetched:
    """The copy of the checkpoint at ``url``, fetched where the cache does not have it. It stays in the cache at least
    until this process ends. ``offline``: as the last fetch left it.

    Raises ``CheckpointError``: nothing there, no manifest, a file that is not what the manifest says, no room.
    """
    url = url.rstrip("/")
    home = cache_dir() / "buckets"
    origin = home / "origins" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    if offline:
        if not origin.exists() or not (path := home / str(read_json_object(origin)["copy"])).is_dir():
            raise CheckpointError(f"{url} is not in the cache, and the network is not to be used")
        _hold(home, path.name)
        return Fetched(path, _size(path), 0)
    require(SCHEMES[url.partition("://")[0]], url)
    with _errors(url):
        bucket = _Bucket(url)
        manifest, card = bucket.small(MANIFEST), bucket.small(CARD_FILE)
        if manifest is None:
            raise CheckpointError(
                f"{url} holds no {MANIFEST}: nothing says what its files must be. Put there what qserve quantize or "
                "qserve convert wrote, the manifest last"
            )
        files = _checked(url, parse_manifest(manifest, f"{url}/{MANIFEST}"))
        path = home / hashlib.sha256(manifest + (card or b"")).hexdigest()[:32]
        for folder in (home / "locks", origin.parent):
            folder.mkdir(parents=True, exist_ok=True)
        came = 0
        with _locked(home / "locks" / f"{path.name}.fetch"):
            if not path.is_dir():
                came = _fetch(bucket, files, {MANIFEST: manifest, CARD_FILE: card}, path, progress)
            _hold(home, path.name)
        os.utime(path)
        write_atomically(origin, json.dumps({"url": url, "copy": path.name}).encode())
    return Fetched(path, sum(file.bytes for file in files.values()), came)


def cached() -> Iterator[tuple[str, Path]]:
    """(URL, directory) of the copies that the cache has, each as it was fetched last."""
    home = cache_dir() / "buckets"
    for origin in sorted(home.glob("origins/*.json")):
        record = read_json_object(origin)
        if (path := home / str(record["copy"])).is_dir():
            yield str(record["url"]), path


class _Bucket:
    """The files below a URL."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._files: Any = fsspec.filesystem(url.partition("://")[0], skip_instance_cache=True)
        self.url = url

    def small(self, name: str) -> bytes | None:
        """The content of a small file; None where there is none."""
        try:
            with self.open(name) as file:
                content: bytes = file.read(MAX_SMALL + 1)
        except FileNotFoundError:
            return None
        if len(content) > MAX_SMALL:
            raise CheckpointError(f"{self.url}/{name} has more than {MAX_SMALL >> 20} MiB")
        return content

    def open(self, name: str) -> Any:
        return self._files.open(f"{self.url}/{name}", "rb", block_size=CHUNK, cache_type="readahead")


def _checked(url: str, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """``files``. Raises for a name that no file of a checkpoint has: outside the directory, a pickle, or code."""
    for name in files:
        if PurePosixPath(name).name != name or not any(fnmatchcase(name, pattern) for pattern in PATTERNS):
            raise CheckpointError(f"{url}/{MANIFEST} names {name!r:.100}, which is no file of a checkpoint")
    return files


def _fetch(
    bucket: _Bucket, files: dict[str, FileEntry], small: dict[str, bytes | None], path: Path, progress: Progress
) -> int:
    """Make the copy at ``path``. Whole files of an interrupted fetch are used again. Returns the bytes that came."""
    total = sum(file.bytes for file in files.values())
    partial = path.with_name(f".{path.name}.partial")
    partial.mkdir(exist_ok=True)
    _make_room(path.parent, total - _size(partial), bucket.url)
    came = done = 0
    for name, entry in files.items():
        target = partial / name
        if not (target.exists() and target.stat().st_size == entry.bytes and file_sha256(target) == entry.sha256):
            digest, size = hashlib.sha256(), 0
            with bucket.open(name) as source, target.open("wb") as out:
                while chunk := source.read(CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    if size > entry.bytes:
                        break
                    progress(done + size, total)
            came += size
            if size != entry.bytes or digest.hexdigest() != entry.sha256:
                target.unlink()
                raise CheckpointError(f"{bucket.url}/{name} differs from its hash in {MANIFEST}; put it there again")
        done += entry.bytes
        progress(done, total)
    for name, content in small.items():
        if content is not None:
            (partial / name).write_bytes(content)
    for each in partial.iterdir():
        if each.name not in files and small.get(each.name) is None:
            each.unlink()
        else:
            sync(each)
    partial.rename(path)
    sync(path.parent)
    return came


def _make_room(home: Path, needed: int, url: str) -> None:
    """Remove the copies that were opened least recently and are not in use, until the new one has room."""
    copies = sorted((path for path in home.iterdir() if _is_copy(path)), key=lambda path: path.stat().st_mtime)
    held = sum(map(_size, copies))
    allowed = int(CACHE_SHARE * (held + shutil.disk_usage(home).free))
    for copy in copies:
        if held + needed <= allowed:
            return
        size = _size(copy)
        with _lock_file(home, copy.name) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(copy)
        held -= size
    if held + needed > allowed:
        raise CheckpointError(
            f"no room for {url} in {home}: it has {needed >> 20:,} MiB, models in use {held >> 20:,} MiB, and "
            f"{allowed >> 20:,} MiB are allowed ({CACHE_SHARE:.0%} of the cache and the free disk)"
        )


def _is_copy(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and path.name not in ("locks", "origins")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _lock_file(home: Path, name: str) -> TextIO:
    return (home / "locks" / f"{name}.use").open("a")


def _hold(home: Path, name: str) -> None:
    """Keep a copy from being removed while this process lives."""
    lock = _lock_file(home, name)
    fcntl.flock(lock, fcntl.LOCK_SH)
    _in_use.append(lock)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process fetches a copy; others wait and find it."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """What the packages of the stores raise becomes one line."""
    try:
        yield
    except CheckpointError:
        raise
    except PermissionError as error:
        raise CheckpointError(f"{url} may not be read with these credentials: {_line(error)}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{url} is incomplete: a file that its {MANIFEST} names is missing") from None
    except Exception as error:  # each store has errors of its own: no credentials, no network, no such bucket
        raise CheckpointError(f"{url} cannot be fetched: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
