"""``read_header``: the metadata of a GGUF file, and where its tensors lie.

Every size is checked against the file before anything of that size is read, so a damaged file is refused at once.

The layout is that of the specification of GGUF, versions 2 and 3, in this machine's byte order.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from qserve.checkpoint.errors import CheckpointError

MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 14
MAX_DIMENSIONS = 4
MAX_NAME = 128
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""``struct``'s letters by GGUF's types of values."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class _Damaged(Exception):
    """What is wrong with a file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file.

    Attributes:
        shape: outermost dimension first.
        start, nbytes: where its bytes lie in the file.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its tensors: values by key (arrays of numbers as numpy arrays, of strings as lists),
    and the tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Raises ``CheckpointError``, in one line that names the file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise CheckpointError(
                    f"{path} is no GGUF file (it starts with {magic!r}); give a model directory or a .gguf file"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except _Damaged as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}); fetch it again") from None


class _Cursor:
    """Reads one value after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._size = data, 4, len(data)

    def header(self) -> Header:
        (version,) = self._numbers("I", 1)
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise _Damaged("it was written for the other byte order")
            raise _Damaged(f"version {version} of the format is not known")
        tensors, keys = (int(n) for n in self._numbers("Q", 2))
        if keys > MAX_KEYS or tensors > MAX_TENSORS:
            raise _Damaged(f"it claims {keys:,} keys and {tensors:,} tensors, the most are {MAX_KEYS:,} and "
                           f"{MAX_TENSORS:,}")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._name()
            if key in metadata:
                raise _Damaged(f"the key {key!r} is there twice")
            metadata[key] = self._value(key)
        entries = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment is {alignment!r}, not a power of two")
        begin = -(-self._at // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            per_block, block = GGML_QUANT_SIZES[kind]
            if shape[-1] % per_block:
                raise _Damaged(f"rows of {name} have {shape[-1]} elements, which no blocks of {per_block} hold")
            nbytes = math.prod(shape) // per_block * block
            if begin + offset + nbytes > self._size:
                raise _Damaged(f"{name} ends at byte {begin + offset + nbytes:,} of {self._size:,}")
            if name in found:
                raise _Damaged(f"the tensor {name} is there twice")
            found[name] = StoredTensor(shape, kind, begin + offset, nbytes)
        return Header(metadata, found)

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._name()
        (count,) = self._numbers("I", 1)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise _Damaged(f"{name} has {count:,} dimensions")
        shape = tuple(int(n) for n in reversed(self._numbers("Q", count)))
        (kind,), (offset,) = self._numbers("I", 1), self._numbers("Q", 1)
        try:
            return name, shape, GGMLQuantizationType(kind), int(offset)
        except ValueError:
            raise _Damaged(f"{name} is stored in the unknown type {kind}") from None

    def _value(self, key: str) -> Any:
        (kind,) = self._numbers("I", 1)
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            (inner,), (count,) = self._numbers("I", 1), self._numbers("Q", 1)
            if inner == _STRING:
                return self._strings(int(count), key)
            return self._raw(self._letter(inner, key), int(count), key)
        return self._numbers(self._letter(kind, key), 1)[0]

    def _letter(self, kind: int, key: str) -> str:
        if kind not in _NUMBERS:
            raise _Damaged(f"{key} has a value of the unknown type {kind}")
        return _NUMBERS[kind]

    def _raw(self, letter: str, count: int, key: str) -> np.ndarray[Any, Any]:
        nbytes = count * struct.calcsize(letter)
        if nbytes > self._size - self._at:
            raise _Damaged(f"{key} claims {count:,} values, more than the file holds")
        return np.frombuffer(self._take(nbytes), letter)

    def _strings(self, count: int, key: str) -> list[str]:
        if count * 8 > self._size - self._at:
            raise _Damaged(f"{key} claims {count:,} strings, more than the file holds")
        data, at, size, values = self._data, self._at, self._size, []
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size or (end := at + 8 + length(data, at)[0]) > size:
                raise _Damaged(f"a string of {key} is longer than the file")
            values.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._at = at
        return values

    def _name(self) -> str:
        """A key, or the name of a tensor: errors quote them."""
        name = self._string()
        if len(name) > MAX_NAME or not name.isprintable():
            raise _Damaged(f"{name[:MAX_NAME]!r} is no name")
        return name

    def _string(self) -> str:
        (length,) = self._numbers("Q", 1)
        return self._take(int(length)).decode("utf-8", "replace")

    def _numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"={count}{letter}", self._take(count * struct.calcsize(f"={letter}")))

    def _take(self, nbytes: int) -> bytes:
        if nbytes > self._size - self._at:
            raise _Damaged(f"it ends at byte {self._size:,}, within its header")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]
