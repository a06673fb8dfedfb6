"""``BlockFiles``: KV blocks in a directory, one blob each, within a size.

A blob is a header and the bytes of the block. The header has the key of the block and a checksum, so that what is
damaged, cut short or put under another name is never used: it is deleted, with a line in the log. Blobs of one
fingerprint lie in a directory of its name: what other models, kernels or KV dtypes wrote is not looked at. It counts
for the size, and goes first if it was used least recently.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import struct
import time
import zlib
from collections import OrderedDict
from pathlib import Path

from qserve.checkpoint.errors import UsageError
from qserve.runtime.block_tiers import Key

logger = logging.getLogger(__name__)

_MAGIC = b"qservekv1"
_HEADER = struct.Struct("<9sHII32s")  # magic, group, bytes of the block, CRC-32 of key and block, digest
_BLOB = re.compile(r"([0-9]{1,4})-([0-9a-f]{64})\.kv")
_PARTIAL = re.compile(r"\.[0-9]{1,4}-[0-9a-f]{64}\.kv")
_PROBE_BYTES = 16 << 20


class BlobError(Exception):
    """Bytes that are no whole blobs."""


def pack(key: Key, block: bytes) -> bytes:
    """The blob of a block."""
    return _header(key, memoryview(block)) + block


def unpack(content: bytes, block_bytes: int) -> list[tuple[Key, bytes]]:
    """The blocks in blobs that follow each other. Raises ``BlobError`` where one is damaged, or of another size."""
    found, size = [], _HEADER.size + block_bytes
    if len(content) % size:
        raise BlobError(f"{len(content)} bytes are no whole KV blocks of {block_bytes}")
    for start in range(0, len(content), size):
        header, block = content[start : start + _HEADER.size], content[start + _HEADER.size : start + size]
        key: Key = _HEADER.unpack(header)[1], _HEADER.unpack(header)[4]
        if header != _header(key, memoryview(block)):
            raise BlobError("a KV block is damaged")
        found.append((key, block))
    return found


class BlockFiles:
    """The blobs of ``fingerprint`` in ``directory``, each of ``block_bytes`` and a header. For one thread at a time.

    ``limit``: bytes of all blobs in ``directory``; the least recently used ones make room. Raises ``UsageError``
    where the directory cannot be written, another process uses it, or not one block fits.
    """

    def __init__(self, directory: Path, limit: int, fingerprint: str, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._blob_bytes = _HEADER.size + block_bytes
        if limit < self._blob_bytes:
            raise UsageError(f"--kv-offload-dir-size {limit} holds no KV block of {self._blob_bytes} bytes; raise it")
        self._limit = limit
        self._own = directory / fingerprint[:32]
        self._failing = False
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # of all blobs, the least recently used first
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (directory / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._scan(directory)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and self._own.is_dir():
                raise UsageError(f"--kv-offload-dir {directory} is in use by another process; choose another") from None
            raise UsageError(f"--kv-offload-dir {directory} cannot be used: {error.strerror or error}") from None
        self.nbytes = sum(self._sizes.values())
        self._make_room(0)

    def keys(self) -> list[Key]:
        """What is there of this fingerprint. Only a read tells whether it is whole."""
        return [key for path in self._sizes if (key := self._key_of(path)) is not None]

    def write(self, key: Key, block: memoryview) -> tuple[bool, tuple[Key, ...]]:
        """Whether ``block`` is on disk now, and the keys whose blobs made room for it.

        The blob appears under its name when it is complete. It is not forced to the disk: after a power failure its
        checksum tells what is missing, and it is computed again.
        """
        path, dropped = self._path(key), self._make_room(self._blob_bytes)
        partial = path.with_name(f".{path.name}")
        try:
            with open(partial, "wb", opener=_private) as file:
                file.write(_header(key, block))
                file.write(block)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if not self._failing:  # one line until a write succeeds again
                logger.warning("KV blocks cannot be written to %s: %s", self._own, error.strerror or error)
            self._failing = True
            return False, dropped
        self._failing = False
        self.nbytes += self._blob_bytes - self._sizes.pop(path, 0)
        self._sizes[path] = self._blob_bytes
        return True, dropped

    def read(self, key: Key, block: memoryview) -> bool:
        """Fill ``block``. False where the blob is missing or not what its name says; then it is deleted."""
        path = self._path(key)
        header = bytearray(_HEADER.size)
        try:
            with path.open("rb", buffering=0) as file:
                whole = file.readinto(header) == len(header) and _read_all(file.fileno(), block)
                whole = whole and not os.read(file.fileno(), 1)
            if whole and header == _header(key, block):
                os.utime(path)
                self._sizes.move_to_end(path)
                return True
            reason = "damaged"
        except OSError as error:
            reason = error.strerror or str(error)
        logger.warning("the KV block %s is ignored and deleted: %s", path, reason)
        self._drop(path)
        return False

    def probe(self) -> float:
        """Measured seconds to read a block that the system does not keep in memory."""
        count = max(_PROBE_BYTES // self.block_bytes, 1)
        path, block = self._own / ".probe", bytearray(self.block_bytes)
        try:
            with open(path, "w+b", opener=_private) as file:
                for _ in range(count):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                began = time.perf_counter()
                for _ in range(count):
                    file.readinto(block)
                    zlib.crc32(block)
                return (time.perf_counter() - began) / count
        except OSError as error:
            raise UsageError(f"{self._own} cannot be written: {error.strerror or error}") from None
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.close()

    def check(self) -> None:
        """Raise ``AssertionError`` unless the blobs are those that are known, and within their size."""
        assert self.nbytes == sum(self._sizes.values()) <= self._limit
        found = {path for path in self._own.parent.glob("*/*") if _BLOB.fullmatch(path.name)}
        assert found == self._sizes.keys(), "blobs are lost, or there is one too many"
        assert all(path.stat().st_size == size for path, size in self._sizes.items())

    def _scan(self, directory: Path) -> None:
        """Find the blobs of all fingerprints. What is half written goes; what is no blob is left alone."""
        found, partial, foreign = [], 0, 0
        for entry in (each for folder in os.scandir(directory) if folder.is_dir() for each in os.scandir(folder.path)):
            path, size = Path(entry.path), entry.stat(follow_symlinks=False).st_size
            if not entry.is_file(follow_symlinks=False):
                foreign += 1
            elif _PARTIAL.fullmatch(entry.name) or (path.parent == self._own and _BLOB.fullmatch(entry.name)
                                                    and size != self._blob_bytes):  # fmt: skip
                path.unlink()
                partial += 1
            elif _BLOB.fullmatch(entry.name):
                found.append((entry.stat().st_mtime_ns, path, size))
            else:
                foreign += 1
        if partial or foreign:
            logger.warning("%s: %d half-written KV blocks are deleted, %d other files are ignored",
                           directory, partial, foreign)  # fmt: skip
        self._sizes.update((path, size) for _, path, size in sorted(found))

    def _make_room(self, size: int) -> tuple[Key, ...]:
        """Delete blobs until ``size`` bytes more are within the limit. Returns those keys that are of this fingerprint.
        """
        dropped = []
        while self.nbytes + size > self._limit and self._sizes:
            path = next(iter(self._sizes))
            self._drop(path)
            if (key := self._key_of(path)) is not None:
                dropped.append(key)
        return tuple(dropped)

    def _drop(self, path: Path) -> None:
        self.nbytes -= self._sizes.pop(path, 0)
        path.unlink(missing_ok=True)

    def _path(self, key: Key) -> Path:
        group, digest = key
        return self._own / f"{group}-{digest.hex()}.kv"

    def _key_of(self, path: Path) -> Key | None:
        found = _BLOB.fullmatch(path.name) if path.parent == self._own else None
        return None if found is None else (int(found[1]), bytes.fromhex(found[2]))


def _header(key: Key, block: memoryview) -> bytes:
    group, digest = key
    checksum = zlib.crc32(block, zlib.crc32(digest, group))
    return _HEADER.pack(_MAGIC, group, len(block), checksum, digest)


def _read_all(descriptor: int, block: memoryview) -> bool:
    """Fill ``block``: a read may return less than it was asked for. False at an early end of the file."""
    done = 0
    while done < len(block):
        count = os.readv(descriptor, [block[done:]])
        if count == 0:
            return False
        done += count
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
