"""The local store: models come from a hub (a small one of our own, over real HTTP), are listed, and go again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants
from typer.testing import CliRunner

from qserve.checkpoint.card import QualityCard, write_card
from qserve.checkpoint.demo import demo_path
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.pull import choose
from qserve.checkpoint.source import open_model
from qserve.cli import app
from tests.qserve import fake_hub

Qserve = Callable[..., subprocess.CompletedProcess[str]]
Cli = Callable[..., Any]


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path) -> Iterator[Any]:
    """``org/tiny`` is the tiny model with a pickle and code beside it; ``org/pickled`` has only the pickle."""
    folder = tmp_path / "hub" / "org" / "tiny"
    shutil.copytree(tiny_model, folder)
    (folder / "README.md").write_text("hello")
    (folder / "modeling.py").write_text("raise SystemExit('code was run')")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    pickled = tmp_path / "hub" / "org" / "pickled"
    pickled.mkdir()
    shutil.copy(folder / "config.json", pickled)
    shutil.copy(folder / "pytorch_model.bin", pickled)
    with fake_hub.FakeHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def qserve(hub: Any, tmp_path: Path) -> Qserve:
    """Runs a command in a process of its own: the hub's library reads where it is when it is imported."""
    home = tmp_path / "home"
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "XDG_CACHE_HOME": str(home)}
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "qserve", *map(str, args)],
            env=cleared | settings | {"NO_PROXY": "127.0.0.1", "COLUMNS": "200"},
            cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cache for commands in this process, which has no hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick(hub: Any, cli: Cli, here: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Runs a command in this process, which reaches the hub meanwhile: importing takes longer than what is tested."""
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.devnull)

    def run(*args: object, endpoint: str = hub.url, offline: bool = False) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", offline)
            patch.setattr(constants, "ENDPOINT", endpoint)
            template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            return cli(*args)

    close_session()  # another one may have learned of a proxy
    yield run
    close_session()


def snapshot(tmp_path: Path, name: str = "tiny") -> Path:
    return tmp_path / "home" / "hub" / f"models--org--{name}" / "snapshots" / fake_hub.COMMIT


def test_pull_fetches_checks_and_repairs_and_never_touches_pickles_or_code(hub, qserve, quick, tmp_path) -> None:
    done = qserve("pull", "org/tiny")
    assert done.returncode == 0, done.stderr
    assert str(snapshot(tmp_path)) in done.stdout and "every file matches its hash" in done.stdout
    names = {path.name for path in snapshot(tmp_path).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"pytorch_model.bin", "modeling.py", "README.md"}
    assert len(open_model(snapshot(tmp_path)).names()) > 10
    assert sorted(hub.served) == sorted(names)

    # A file that was damaged here, with the right size, is found and fetched again; nothing else is.
    hub.served.clear()
    blob = (snapshot(tmp_path) / "model.safetensors").resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert quick("pull", "org/tiny@main").code == 0
    assert hub.served == ["model.safetensors"]
    assert blob.read_bytes() == content

    # It opens by its name without the hub, as every command takes it.
    hub.served.clear()
    source = open_model("org/tiny", offline=True)
    assert source.name == "org/tiny" and source.path == snapshot(tmp_path)
    assert "there already" in quick("pull", "org/tiny").out
    assert not hub.served


def test_a_connection_that_breaks_and_a_file_that_is_wrong(hub, quick, tmp_path) -> None:
    hub.cut = "model.safetensors"
    assert quick("pull", "org/tiny@v1").code == 0
    assert len(open_model(snapshot(tmp_path)).names()) > 10

    shutil.rmtree(tmp_path / "home")
    hub.damage = lambda name, content: content[::-1] if name == "model.safetensors" else content
    quick("pull", "org/tiny").refused(1, "model.safetensors differs from its hash")
    assert not (snapshot(tmp_path) / "model.safetensors").exists()
    assert (snapshot(tmp_path) / "config.json").exists()

    # What came whole is not fetched again.
    hub.damage = lambda name, content: content
    hub.served.clear()
    assert quick("pull", "org/tiny").code == 0
    assert "model.safetensors" in hub.served and "config.json" not in hub.served


def test_a_branch_that_moves_while_it_is_pulled(hub, quick, tmp_path) -> None:
    def moved(name: str, content: bytes) -> bytes:
        hub.commit = fake_hub.NEXT_COMMIT
        return content

    hub.damage = moved
    quick("pull", "org/tiny").refused(1, "org/tiny changed on the hub", "try again")
    assert quick("pull", "org/tiny").code == 0
    assert open_model("org/tiny", offline=True).path == snapshot(tmp_path).with_name(fake_hub.NEXT_COMMIT)


def test_what_is_not_pulled(hub, quick) -> None:
    quick("pull", "org/pickled").refused(1, "only as pickles (pytorch_model.bin)")
    quick("pull", "org/absent").refused(1, "org/absent is neither a local path nor a model on the hub")
    quick("pull", "org/tiny@v9").refused(1, "no such revision")
    quick("pull", "./here").refused(1, "is no model id")
    quick("pull", "org/tiny", endpoint="http://127.0.0.1:9").refused(1, "the hub cannot be reached")
    quick("pull", "org/tiny", offline=True).refused(1, "the hub cannot be reached")
    assert not hub.served


def test_a_gguf_repository(hub, quick, tmp_path) -> None:
    folder = hub.root / "org" / "ggufs"
    folder.mkdir()
    (folder / "a-Q4.gguf").write_bytes(b"GGUF one")
    (folder / "a-Q8.gguf").write_bytes(b"GGUF two")
    quick("pull", "org/ggufs").refused(1, "2 GGUF files", "--file", "a-Q4.gguf, a-Q8.gguf")
    quick("pull", "org/ggufs", "--file", "b.gguf").refused(1, "has no file b.gguf")
    done = quick("pull", "org/ggufs", "--file", "a-Q8.gguf")
    assert done.code == 0, done.err
    assert hub.served == ["a-Q8.gguf"]
    path = snapshot(tmp_path, "ggufs") / "a-Q8.gguf"
    assert str(path) in done.out
    with pytest.raises(CheckpointError, match=str(path)):  # found by its name; it is no real one
        open_model("org/ggufs", offline=True)


def test_which_files_make_a_model() -> None:
    with_both = ["config.json", "model.safetensors", "pytorch_model.bin", "x.gguf", "original/consolidated.00.pth",
                 "consolidated.safetensors", "onnx/model.json", "tokenizer.model", "modeling_x.py", "merges.txt"]
    assert choose("m", with_both) == ["config.json", "model.safetensors", "tokenizer.model", "merges.txt"]
    assert choose("m", with_both, "x.gguf") == ["x.gguf"]
    assert choose("m", ["config.json", "only.gguf", "Q4/part.gguf"]) == ["only.gguf"]
    with pytest.raises(CheckpointError, match="neither safetensors nor GGUF"):
        choose("m", ["config.json", "tf_model.h5"])


SHA = "0" * 64
CARD = QualityCard("base", SHA, "text", SHA, 1024, 512, 10.0, 10.5, 0.05, 0.04, 0.1, 0.9, "native", "2026-01-01")


def test_list_and_rm(quick, cli, tiny_packed, tmp_path) -> None:
    assert quick("pull", "org/tiny").code == 0
    mine = tmp_path / "models" / "mine" / "w4"
    shutil.copytree(tiny_packed, mine)
    write_card(mine, CARD)
    (tmp_path / "models" / ".w5.partial" / "checkpoint").mkdir(parents=True)
    broken = tmp_path / "models" / "broken"
    shutil.copytree(tiny_packed, broken)
    (broken / "config.json").write_text("{")
    (tmp_path / "models" / "app").mkdir()
    (tmp_path / "models" / "app" / "config.json").write_text('{"port": 1}')  # not a model's

    done = cli("list", "models", "--json")
    assert done.code == 0, done.err
    found = {model["name"]: model for model in json.loads(done.out)}
    assert found.keys() == {"models/mine/w4", "models/broken", "org/tiny"}
    ours, cached = found["models/mine/w4"], found["org/tiny"]
    assert ours["format"] == "gptq" and 4 < ours["bits_per_weight"] < 16
    assert ours["quality_card"]["kl_mean"] == 0.05
    assert ours["bytes"] == sum(path.stat().st_size for path in mine.iterdir())
    assert (cached["format"], cached["quality_card"]) == ("hf", None) and cached["bytes"] > 100_000
    assert "config.json is not valid JSON" in found["models/broken"]["problem"]
    table = cli("list", "models").out
    assert "0.0500" in table and "+5.0%" in table and "90.0%" in table and "unreadable" in table

    # It asks, and an answer that is none is no.
    done = cli("rm", "models/mine/w4")
    assert done.code == 1 and mine.exists()
    done = cli("rm", "models/mine/w4", "--yes")
    assert done.code == 0 and "are free" in done.out
    assert list(mine.parent.iterdir()) == []
    assert cli("rm", "org/tiny", "--yes").code == 0
    assert not snapshot(tmp_path).exists()
    cli("rm", "org/tiny", "--yes").refused(1, "neither a local path nor in the hub cache")
    with pytest.raises(CheckpointError, match="not in the hub cache"):
        open_model("org/tiny", offline=True)


def test_what_rm_does_not_remove(cli, tiny_model, tiny_packed, tmp_path) -> None:
    for name, words in {
        tmp_path: "neither manifest.json nor quality_card.json",
        tiny_model: "is no checkpoint that qserve wrote",
        tmp_path / "absent" / "x" / "y": "does not exist",
        Path(__file__): "is a file that qserve did not write",
    }.items():
        cli("rm", name, "--yes").refused(1, words)
    mine = tmp_path / "w4"
    shutil.copytree(tiny_packed, mine)
    (tmp_path / "link").symlink_to(mine)
    cli("rm", tmp_path / "link", "--yes").refused(1, "is a link")
    (mine / "thesis.tex").write_text("years of work")
    cli("rm", mine, "--yes").refused(1, "also holds thesis.tex")
    (mine / "thesis.tex").unlink()
    (mine / "notes").mkdir()
    cli("rm", mine, "--yes").refused(1, "also holds notes")
    (mine / "notes").rmdir()
    (mine / "manifest.json").write_text('{"files": {"../w4.tex": {"bytes": 1, "sha256": "0"}}}')
    (tmp_path / "w4.tex").write_text("more")
    assert CliRunner().invoke(app, ["rm", str(mine)], input="n\n").exit_code == 1
    assert mine.exists()
    done = CliRunner().invoke(app, ["rm", str(mine)], input="y\n")
    assert done.exit_code == 0 and "Remove the checkpoint" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "w4.tex"]


def test_the_demo_is_removed(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli("rm", "demo", "--yes").refused(1, "the demo model is not in")
    demo_path().parent.mkdir()
    demo_path().write_bytes(b"GGUF, or so it says")
    assert cli("rm", "demo", "--yes").code == 0
    assert not demo_path().exists()


def test_list_refuses_what_is_no_directory(cli, tmp_path) -> None:
    cli("list", tmp_path / "absent").refused(1, "is not a directory")
