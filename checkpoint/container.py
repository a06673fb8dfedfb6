"""The safetensors container, written by copying: tensors that lie in other files become one file.

Layout: 8 bytes of header length, a JSON header, data; see https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qserve.checkpoint.errors import CheckpointError

CHUNK = 1 << 20
"""Bytes in flight while a file is copied or hashed."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in a header."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorBytes:
    """One tensor as bytes of a file: row-major, little-endian; ``dtype`` by its name in a header ("BF16")."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def write_safetensors(path: Path, tensors: Sequence[TensorBytes]) -> None:
    """Write ``tensors`` as one durable safetensors file, ``CHUNK`` bytes at a time.

    Wide dtypes come first, otherwise the given order is kept. So every tensor is aligned to its dtype without gaps
    between tensors; readers demand both. Raises ``CheckpointError`` for a source cut short, ``OSError``.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    buffer = memoryview(bytearray(CHUNK))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            _copy(tensor, file, buffer)
        file.flush()
        os.fsync(file.fileno())


def _copy(tensor: TensorBytes, target: BinaryIO, buffer: memoryview) -> None:
    left = tensor.nbytes
    with tensor.file.open("rb", buffering=0) as source:
        source.seek(tensor.offset)
        while left:
            count = source.readinto(buffer[:left])
            if not count:
                raise CheckpointError(f"{tensor.file} was cut short while it was read; run the command again")
            target.write(buffer[:count])
            left -= count
