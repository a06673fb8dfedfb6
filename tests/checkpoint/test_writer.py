from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from qserve.checkpoint import writer as module
from qserve.checkpoint.card import QualityCard, read_card, write_card
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter

CONFIG = {"model_type": "llama", "dtype": "float32", "vocab_size": 8}


def write(out: Path, value: float = 1.0, **options: object) -> None:
    with CheckpointWriter(out, **options) as writer:
        writer.put_json("config.json", CONFIG)
        for i in range(6):
            writer.put(f"t{i}", torch.full((100,), value + i))
        writer.finish()


def packed() -> QuantizedWeight:
    g = torch.Generator().manual_seed(0)
    return QuantizedWeight(
        WeightScheme(4, 32),
        torch.randint(0, 16, (16, 64), dtype=torch.uint8, generator=g),
        torch.rand(16, 2, generator=g).to(torch.float16).to(torch.float32),
        bias=torch.ones(16),
    )


def nothing_left(tmp_path: Path) -> bool:
    return list(tmp_path.iterdir()) == []


def test_one_file(tmp_path) -> None:
    write(tmp_path / "deep" / "out")
    out = tmp_path / "deep" / "out"
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "manifest.json"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    source = HFDirectory(out)
    assert all(torch.equal(source.tensor(f"t{i}"), torch.full((100,), 1.0 + i)) for i in range(6))
    source.verify()
    assert out.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_shards_and_index(tmp_path) -> None:
    write(tmp_path / "out", shard_bytes=900)
    out = tmp_path / "out"
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in out.glob("*.safetensors")) == names
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2400
    assert index["weight_map"] == {f"t{i}": names[i // 2] for i in range(6)}
    source = HFDirectory(out)
    source.verify()
    assert all(torch.equal(source.tensor(f"t{i}"), torch.full((100,), 1.0 + i)) for i in range(6))


def test_writing_takes_no_memory(tmp_path) -> None:
    """The address space is limited to 24 MiB more than with the tensor there: neither ``put`` nor ``commit`` nor the
    merge into shards may hold a copy of its 64 MiB."""
    script = textwrap.dedent(f"""
        import re, resource, torch
        from qserve.checkpoint.writer import CheckpointWriter
        tensor = torch.arange(8 << 20)
        size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20),) * 2)
        with CheckpointWriter({str(tmp_path / "out")!r}, facts={{"name": "job"}}, shard_bytes=128 << 20) as writer:
            writer.put("large", tensor)
            writer.commit("large")
            writer.put("half", tensor[::2][:1])
            writer.put_json("config.json", {{}})
            writer.finish()
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 64 << 20


def test_tensors_are_written_at_once_and_views_alone(tmp_path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.put_json("config.json", CONFIG)
        writer.put("whole", base)
        writer.put("transposed", base.t())
        writer.put("row", base[1])
        writer.put("parameter", torch.nn.Parameter(base[0]))
        base.zero_()
        writer.finish()
    source = HFDirectory(tmp_path / "out")
    assert source.tensor("transposed").tolist() == torch.arange(12.0).reshape(3, 4).t().tolist()
    assert source.tensor("row").tolist() == [4, 5, 6, 7]
    assert source.stored_bytes() < 1000


def test_a_packed_linear_survives(tmp_path) -> None:
    spec = QuantSpec("gptq", WeightScheme(4, 32))
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.put_json("config.json", CONFIG | {"quantization_config": FORMATS["gptq"].config_of(spec)})
        writer.put_linear("model.layers.0.mlp.up_proj", packed())
        writer.finish()
    source = HFDirectory(tmp_path / "out")
    assert source.spec == spec and source.names() == []
    found = source.linear("model.layers.0.mlp.up_proj")
    assert torch.equal(found.dequantize(), packed().dequantize()) and torch.equal(found.bias, torch.ones(16))


def test_a_weight_that_is_no_weight_is_refused_by_name(tmp_path) -> None:
    weight = packed()
    weight.scales[0, 0] = float("nan")
    with CheckpointWriter(tmp_path / "out") as writer, pytest.raises(CheckpointError, match=r"up_proj.*NaN"):
        writer.put_linear("up_proj", weight)
    assert nothing_left(tmp_path)


def test_a_name_is_written_once(tmp_path) -> None:
    with CheckpointWriter(tmp_path / "out", shard_bytes=8) as writer:
        writer.put("a", torch.zeros(4))
        writer.put("b", torch.zeros(4))
        with pytest.raises(CheckpointError, match="twice"):
            writer.put("a", torch.zeros(4))


def test_a_later_part_can_replace_a_tensor(tmp_path) -> None:
    """It keeps its place; a writer that resumes replaces as well."""
    for _ in range(2):
        with CheckpointWriter(tmp_path / "out", facts={"name": "f"}) as writer:
            if not writer.resumed:
                writer.put("a", torch.zeros(4))
                writer.put("b", torch.zeros(4))
                writer.commit("first")
                continue
            with pytest.raises(ValueError, match="replaces nothing"):
                writer.put("d", torch.ones(4), replace=True)
            writer.put("a", torch.ones(4), replace=True)
            writer.commit("second")
            writer.put("c", torch.zeros(4))
            writer.put_json("config.json", {})
            writer.finish()
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("a"), torch.ones(4)) and torch.equal(file.get_tensor("b"), torch.zeros(4))
        assert list(file.offset_keys()) == ["a", "b", "c"]


def test_nothing_is_left_without_finish(tmp_path) -> None:
    with CheckpointWriter(tmp_path / "out", shard_bytes=8) as writer:
        writer.put("a", torch.zeros(4))
        writer.commit("a")
        writer.put("b", torch.zeros(4))
        assert not nothing_left(tmp_path)
    assert nothing_left(tmp_path)
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "out") as writer:
        writer.put("a", torch.zeros(4))
        raise RuntimeError
    assert nothing_left(tmp_path)


def test_existing_out(tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out)
    with pytest.raises(CheckpointError, match="--overwrite"):
        CheckpointWriter(out)
    write(out, 5.0, overwrite=True)
    assert HFDirectory(out).tensor("t0")[0] == 5.0
    assert list(tmp_path.iterdir()) == [out]
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointWriter(file, overwrite=True)


def test_overwrite_never_replaces_what_is_no_checkpoint(tmp_path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        CheckpointWriter(tmp_path / "thesis", overwrite=True)


def test_a_write_protected_checkpoint_is_refused_before_the_work(tmp_path, monkeypatch) -> None:
    write(tmp_path / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anything
    with pytest.raises(CheckpointError, match="write-protected"):
        CheckpointWriter(tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_at_out_is_followed(tmp_path) -> None:
    write(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", 7.0, overwrite=True)
    assert (tmp_path / "link").is_symlink() and HFDirectory(tmp_path / "real").tensor("t0")[0] == 7.0


def test_the_old_checkpoint_survives_every_failure(tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    write(out)
    with pytest.raises(RuntimeError), CheckpointWriter(out, overwrite=True) as writer:
        writer.put("a", torch.zeros(4))
        raise RuntimeError
    HFDirectory(out).verify()

    rename = os.rename

    def failing(source: object, target: object) -> None:
        if str(source).endswith("/checkpoint"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(out, 9.0, overwrite=True)
    HFDirectory(out).verify()
    assert HFDirectory(out).tensor("t0")[0] == 1.0
    assert list(tmp_path.iterdir()) == [out]


def test_expected_bytes_are_checked_first(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"no space left.*MiB needed.*free") as caught:
        CheckpointWriter(tmp_path / "out", expected_bytes=shutil.disk_usage(tmp_path).total + (1 << 40))
    assert "\n" not in str(caught.value) and nothing_left(tmp_path)
    with CheckpointWriter(tmp_path / "out", expected_bytes=1000):
        pass
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError, match="the checkpoint twice"):
        CheckpointWriter(tmp_path / "out", expected_bytes=int(free * 0.7))


@pytest.mark.parametrize("what", ["tensor", "json"])
def test_no_space_is_one_line_and_leaves_nothing(tmp_path, what) -> None:
    """A real failing disk: the process may not write files beyond 64 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught, CheckpointWriter(tmp_path / "out") as writer:
            if what == "json":
                writer.put_json("config.json", ["x" * 100] * 1000)
            writer.put("a", torch.zeros(100_000))
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value).startswith("no space left to write") and "\n" not in str(caught.value)
    assert nothing_left(tmp_path)


def test_unwritable_place(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError):
        CheckpointWriter(tmp_path / "file" / "out")


def test_verify_finds_what_changed_and_the_card_may_change(tmp_path) -> None:
    out = tmp_path / "out"
    write(out)
    identity = HFDirectory(out).sha256()
    card = QualityCard(
        "base",
        "a" * 64,
        "text",
        "b" * 64,
        100,
        10,
        20.0,
        21.0,
        0.1,
        0.05,
        0.3,
        0.9,
        "reference",
        "2026-01-01",
    )
    write_card(out, card)
    HFDirectory(out).verify()
    assert HFDirectory(out).card == card == read_card(out) and HFDirectory(out).sha256() == identity

    weights = out / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors differs from its hash"):
        HFDirectory(out).verify()
    (out / "config.json").rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match="config"):
        HFDirectory(out)
    shutil.copy(tmp_path / "aside", out / "config.json")
    (out / "manifest.json").write_text('{"files": [1]}')
    with pytest.raises(CheckpointError, match="malformed"):
        HFDirectory(out).verify()


def test_json_that_others_refuse_is_refused(tmp_path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer, pytest.raises(ValueError):
        writer.put_json("config.json", {"x": float("nan")})


def test_what_appears_at_out_meanwhile_is_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "m"
    with CheckpointWriter(out) as writer:
        writer.put_json("config.json", CONFIG)
        writer.put("t", torch.ones(3))
        out.mkdir()
        (out / "precious").write_text("mine")
        with pytest.raises(CheckpointError, match="not empty"):
            writer.finish()
    assert (out / "precious").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["model.gguf", "src/model.py"])
def test_a_directory_with_more_than_a_checkpoint_is_not_overwritten(tmp_path: Path, name: str) -> None:
    out = tmp_path / "m"
    write(out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    with pytest.raises(CheckpointError, match="not overwritten"):
        write(out, overwrite=True)
    assert (out / name).read_text() == "mine"


def test_an_interrupt_between_the_renames_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m"
    write(out)
    rename = os.rename

    def interrupted(source: Path, target: Path) -> None:
        if str(source).endswith("/checkpoint"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(out, 9.0, overwrite=True)
    assert float(HFDirectory(out).tensor("t0")[0]) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
