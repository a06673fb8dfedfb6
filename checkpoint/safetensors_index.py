"""Which tensor lies in which safetensors file, read from the headers alone.

It reads the safetensors container (8 bytes of header length, a JSON header, data) and Hugging Face's shard index.
Truncated files and missing shards are found here, when a model is opened.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ASIDE = "kv_cache.qserve"
"""A safetensors file of tensors that other loaders do not know. Some read every ``*.safetensors`` and refuse strange
names."""
_MAX_HEADER = 100_000_000  # the limit of the reference implementation
_AGAIN = "fetch or write it again"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, the dtype by its name in the header ("BF16"), its shape, its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a model directory by name; raises ``CheckpointError`` naming the file at fault."""
    aside = read_header(directory / ASIDE) if (directory / ASIDE).exists() else {}
    return aside | _read_weights(directory)


def _read_weights(directory: Path) -> dict[str, StoredTensor]:
    if (directory / INDEX).exists():
        return _read_shards(directory)
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        how = "save_to_safetensors of hqq" if (directory / "qmodel.pt").exists() else "save_pretrained of transformers"
        raise CheckpointError(
            f"{directory} holds pickled weights only, which can run code and are not read; "
            f"convert them to safetensors ({how} does)"
        )
    raise CheckpointError(f"{directory} holds no {SINGLE} and no {INDEX}; is this a model directory?")


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    path = directory / INDEX
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path} lacks "weight_map"; {_AGAIN}')
    headers: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        # A plain file name: an index must not point outside its directory.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path} names the shard {shard!r}, which is no file name; {_AGAIN}")
        if shard not in headers:
            if not (directory / shard).exists():
                raise CheckpointError(f"{directory / shard} is missing, named by {INDEX}; fetch it")
            headers[shard] = read_header(directory / shard)
        if name not in headers[shard]:
            raise CheckpointError(f"{directory / shard} lacks the tensor {name}, named by {INDEX}; {_AGAIN}")
        tensors[name] = headers[shard][name]
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; raises ``CheckpointError`` where it is damaged or cut short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length + 8 > size or length > _MAX_HEADER:
                raise CheckpointError(f"{path} is truncated or no safetensors file; {_AGAIN}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is no safetensors file (its header is not JSON); {_AGAIN}") from None
    tensors: dict[str, StoredTensor] = {}
    end = 0
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                first, stop = (int(offset) for offset in entry["data_offsets"])
                shape = tuple(int(n) for n in entry["shape"])
                tensors[name] = StoredTensor(path, str(entry["dtype"]), shape, 8 + length + first, stop - first)
                if first < 0 or stop < first or min(shape, default=0) < 0:
                    raise ValueError
                end = max(end, stop)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise CheckpointError(f"{path} has a malformed safetensors header; {_AGAIN}") from None
    if 8 + length + end != size:
        problem = "is truncated" if 8 + length + end > size else "is longer than its header says"
        raise CheckpointError(f"{path} {problem}: {size:,} bytes, expected {8 + length + end:,}; {_AGAIN}")
    return tensors
