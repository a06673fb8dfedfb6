"""The commands of deploy/README.md agree with the files that they install; ``fresh_machine.py`` follows them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from qserve.cli import app
from tests.deploy import fresh_machine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The commands of the section, continued ones on one line."""
    text = (ROOT / "deploy/README.md").read_text(encoding="utf-8")
    return "".join(fresh_machine.commands(text, fresh_machine.SECTION)).replace("\\\n", " ").splitlines()


def test_what_is_installed_is_there(lines: list[str]) -> None:
    named = {word for line in lines for word in re.findall(r"deploy/[\w./-]+", line)}
    assert {"deploy/systemd/qserve.service", "deploy/nginx/qserve.conf", "deploy/prometheus/alerts.yaml"} <= named
    assert all((ROOT / name).is_file() for name in named), named
    assert (ROOT / "tests/deploy/fresh_machine.py").is_file()


def test_its_qserve_commands_are_those_of_this_version(lines: list[str]) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    calls = [match[1] for line in lines if (match := re.search(r"/opt/qserve/bin/qserve ([^)>]*)", line))]
    assert {call.split()[0] for call in calls} == {"quantize", "key"}
    for call in calls:
        name, *arguments = shlex.split(call, comments=True)
        commands[name].make_context(name, arguments)  # raises for what the command does not take


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("systemd/qserve.service", ["/opt/qserve/bin/qserve", "/srv/models/model", "/etc/qserve/keys.toml"]),
        ("nginx/qserve.conf", ["/etc/nginx/tls/llm.example.com.pem", "/etc/nginx/tls/llm.example.com.key"]),
        ("prometheus/prometheus.yml", ["/etc/prometheus/qserve-key"]),
    ],
)
def test_the_files_look_where_the_section_puts_things(lines: list[str], path: str, named: list[str]) -> None:
    text = (ROOT / "deploy" / path).read_text(encoding="utf-8")
    for name in named:
        assert name in text and any(name in line for line in lines), name


def test_all_speak_of_the_same_server(lines: list[str]) -> None:
    (start,) = re.findall(r"(?m)^ExecStart=(.*)$", (ROOT / "deploy/systemd/qserve.service").read_text(encoding="utf-8"))
    words = shlex.split(start)
    address = f"{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"
    assert f"server {address};" in (ROOT / "deploy/nginx/qserve.conf").read_text(encoding="utf-8")
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [address]}]
    assert any(f"http://{address}/ready" in line for line in lines)
