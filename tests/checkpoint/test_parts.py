from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qserve.checkpoint.container import DTYPES
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.parts import Part, PartWriter, read_part

TENSORS = {dtype: torch.arange(6).to(dtype).reshape(2, 3) for dtype in DTYPES.values()}


def write(path: Path) -> Part:
    writer = PartWriter(path)
    for dtype, tensor in TENSORS.items():
        writer.add(str(dtype), tensor)
    writer.add("transposed", torch.arange(6).reshape(2, 3).t())
    writer.add("one of many", torch.arange(6)[4::2][:1])
    writer.add("scalar", torch.tensor(2.5, dtype=torch.bfloat16))
    writer.add("empty", torch.zeros(0, 4))
    assert not path.exists()
    return writer.commit("key", "job", {"loss": 0.1, "name": "ü"})


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    part = write(tmp_path / "00001")
    assert read_part(tmp_path / "00001") == part and [path.name for path in tmp_path.iterdir()] == ["00001"]
    assert (part.key, part.follows, part.extra) == ("key", "job", {"loss": 0.1, "name": "ü"})
    found = part.load()
    assert list(found) == [*map(str, TENSORS), "transposed", "one of many", "scalar", "empty"]
    for dtype, tensor in TENSORS.items():
        assert found[str(dtype)].dtype == dtype and torch.equal(found[str(dtype)].float(), tensor.float())
    assert found["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]] and found["empty"].shape == (0, 4)
    assert found["one of many"].tolist() == [4]
    assert found["scalar"].shape == () and float(found["scalar"]) == 2.5


def test_any_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "00001"
    write(path)
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            read_part(path)
    for size in range(0, len(content), 11):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="damaged"):
            read_part(path)
    path.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        read_part(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_part(path)


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "00001")
    with pytest.raises(CheckpointError, match=r"phase is torch\.complex64"):
        writer.add("phase", torch.zeros(2, dtype=torch.complex64))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
