"""A plain install lacks some packages: a command that needs one says so in one line, and nothing else imports it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from qserve.chat_client import ChatClient
from qserve.checkpoint import extras
from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.tokenizer import load_tokenizer
from qserve.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without any extra."""
    found = extras.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        return None if name in extras.EXTRAS else found(name)

    monkeypatch.setattr(extras, "find_spec", find_spec)


def test_each_extra_brings_its_package_and_the_plain_install_does_not() -> None:
    for package, extra in extras.EXTRAS.items():
        assert any(line.startswith(package) for line in PROJECT["optional-dependencies"][extra])
        assert not any(line.startswith(package) for line in PROJECT["dependencies"])
        if extra not in ("gs", "ray"):  # gs goes the way of s3; Ray is tested in an environment of its own
            assert extra in next(line for line in PROJECT["optional-dependencies"]["test"] if "qserve-llm" in line)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    "command",
    ["quantize demo out --report DIR", "eval out --html page.html", "plan llama-3-8b --html page.html"],
)
def test_a_page_is_refused_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["qserve", *command.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "a page with plots needs matplotlib" in said and "pip install 'qserve-llm[reports]'" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("plain")
def test_a_conversation_with_a_server_says_what_it_needs() -> None:
    with pytest.raises(QServeError, match=r"needs httpx, .* pip install 'qserve-llm\[chat\]'"):
        ChatClient("http://127.0.0.1:1/v1", None, None, {})


@pytest.mark.usefixtures("plain")
def test_a_tokenizer_of_another_library_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nothing that anybody reads")
    with pytest.raises(QServeError, match=r"needs sentencepiece, .* pip install 'qserve-llm\[sentencepiece\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_the_demo_and_the_server_import_no_extra() -> None:
    absent = f"import sys; sys.modules.update(dict.fromkeys({list(extras.EXTRAS)}))"
    program = f"{absent}; import qserve.demo, qserve.steps, qserve.runtime.llm, qserve.runtime.server.serve"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_h11_is_one_that_refuses_malformed_chunks() -> None:
    """The server's own code builds on it, and uvicorn takes any (CVE-2025-43859 was mended in 0.16)."""
    assert "h11>=0.16" in PROJECT["dependencies"]
