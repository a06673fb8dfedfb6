"""Parts: the durable steps of a checkpoint in the making, one file each, checked by a hash.

A part is the bytes of its tensors one after another, a JSON footer that describes them, the footer's length (8 bytes,
little-endian) and the SHA-256 of all that. The footer comes last so that a tensor goes straight to the disk when it is
put.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.container import CHUNK, DTYPES, NAMES, TensorBytes
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import sync

_TAIL = struct.Struct("<Q32s")

Keep = Callable[[Iterable[tuple[str, Tensor]], dict[str, Any]], None]
"""Makes named tensors and JSON durable, so that unfinished work can go on from them, and replaces the last ones. They
come back as a ``Part``."""


@dataclass(frozen=True)
class Part:
    """A committed part: its key, what it was made after, what the caller stored with it, its tensors, and its hash.

    ``follows`` is the ``digest`` of the part before; for the first part it is the job's fingerprint.
    """

    path: Path
    key: str | None
    follows: str | None
    extra: dict[str, Any]
    tensors: tuple[TensorBytes, ...]
    digest: str

    def read(self, name: str) -> Tensor:
        """One tensor."""
        found = next(tensor for tensor in self.tensors if tensor.name == name)
        try:
            with self.path.open("rb") as file:
                return _read(found, file)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None

    def load(self) -> dict[str, Tensor]:
        """The tensors, in the order in which they were put."""
        try:
            with self.path.open("rb") as file:
                return {tensor.name: _read(tensor, file) for tensor in self.tensors}
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None


class PartWriter:
    """A part being written. It gets its name only when it is complete and durable. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.new")
        self._file = self._partial.open("wb")
        self._hash = hashlib.sha256()
        self._tensors: list[TensorBytes] = []
        self._end = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; ``CheckpointError`` for a dtype that safetensors lacks."""
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which cannot be stored")
        flat = tensor.detach().cpu().contiguous()
        # Not a reshape: a dimension of one element may keep any stride, and then cannot be viewed as bytes.
        data = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK):
            self._write(data[start : start + CHUNK])
        entry = TensorBytes(self._path, name, NAMES[tensor.dtype], tuple(tensor.shape), self._end, len(data))
        self._tensors.append(entry)
        self._end += len(data)

    def commit(self, key: str | None, follows: str | None, extra: dict[str, Any]) -> Part:
        """Complete the part. After a crash there is the whole part, or what it was to replace."""
        tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in self._tensors]
        footer = {"key": key, "follows": follows, "extra": extra, "tensors": tensors}
        text = json.dumps(footer, separators=(",", ":"), ensure_ascii=False).encode()
        self._write(text)
        self._write(struct.pack("<Q", len(text)))
        digest = self._hash.digest()
        self._file.write(digest)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._partial, self._path)
        sync(self._path.parent)
        return Part(self._path, key, follows, extra, tuple(self._tensors), digest.hex())

    def abandon(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):  # the buffered bytes may not fit the disk either
            self._file.close()
        with suppress(OSError):
            self._partial.unlink()

    def _write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)


def read_part(path: Path) -> Part:
    """Read a part's footer and check every byte; raises ``CheckpointError`` where it is missing or damaged."""
    try:
        with path.open("rb") as file:
            return _parse(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        raise CheckpointError(f"{path} is damaged; run the command again to redo it") from None


def _parse(path: Path, file: BufferedReader, size: int) -> Part:
    """Any error but ``OSError`` means damage."""
    file.seek(max(size - _TAIL.size, 0))
    length, digest = _TAIL.unpack(file.read())
    end = size - _TAIL.size - length
    if end < 0 or _sha256(file, size - len(digest)) != digest:
        raise ValueError
    file.seek(end)
    footer = json.loads(file.read(length))
    tensors: list[TensorBytes] = []
    offset = 0
    for name, dtype, shape in footer["tensors"]:
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        tensors.append(TensorBytes(path, name, dtype, tuple(shape), offset, nbytes))
        offset += nbytes
    return Part(path, footer["key"], footer["follows"], footer["extra"], tuple(tensors), digest.hex())


def _sha256(file: BufferedReader, size: int) -> bytes:
    """The hash of the first ``size`` bytes."""
    digest = hashlib.sha256()
    file.seek(0)
    while size and (data := file.read(min(size, CHUNK))):
        digest.update(data)
        size -= len(data)
    return digest.digest()


def _read(tensor: TensorBytes, file: BufferedReader) -> Tensor:
    flat = torch.empty(tensor.nbytes, dtype=torch.uint8)
    file.seek(tensor.offset)
    if file.readinto(flat.numpy().data) != tensor.nbytes:
        raise CheckpointError(f"{tensor.file} was cut short while it was read; run the command again to redo it")
    return flat.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
