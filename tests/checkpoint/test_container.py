from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from qserve.checkpoint.container import CHUNK, DTYPES, TensorBytes, write_safetensors
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.parts import PartWriter


def test_the_library_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    """Odd sizes in an order that would misalign what follows: the library refuses gaps and torch a wrong offset."""
    tensors: dict[str, torch.Tensor] = {"schön": torch.zeros(0, 4), "scalar": torch.tensor(7.0)}
    for number, (name, dtype) in enumerate(reversed(DTYPES.items())):
        tensors[name] = torch.arange(2 * number + 1).to(dtype)
    tensors["larger than a chunk"] = torch.randint(0, 256, (CHUNK + 3,), dtype=torch.uint8)
    writer = PartWriter(tmp_path / "part")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    part = writer.commit("key", None, {})

    write_safetensors(tmp_path / "all.safetensors", part.tensors)
    with safe_open(tmp_path / "all.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
            assert found.data_ptr() % found.element_size() == 0
    write_safetensors(tmp_path / "again.safetensors", part.tensors)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "all.safetensors").read_bytes()


def test_a_source_cut_short_is_no_silent_zero(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="cut short"):
        write_safetensors(tmp_path / "out", [TensorBytes(tmp_path / "source", "t", "U8", (4,), 0, 4)])
