"""``qserve bench`` on a server: the command line, its reports, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle

Cli = Callable[..., Any]
KEY = "bench-key"
SMALL = ("--requests", 4, "--warmup", 1, "--prompt", "16", "--output", "4")


@pytest.fixture(scope="module")
def url(tiny_packed: Path) -> Iterator[str]:
    engine = Engine(str(tiny_packed), EngineConfig(max_num_seqs=8, kv_cache_memory=64 << 20, threads=1))
    with ServerHandle(engine, config=ServerConfig(api_keys=(KEY,), model_name="fox")) as handle:
        yield handle.url.removesuffix("/v1")


def test_a_sweep_and_its_reports(cli: Cli, url: str, tmp_path: Path) -> None:
    written = ("--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--html", tmp_path / "r.html")
    done = cli("bench", url, "--api-key", KEY, "--concurrency", "1,2", *SMALL, "--slo", "ttft=60s,tpot=30s", *written)
    assert done.code == 0, done.err
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["kind"] == "bench" and content["data"]["ceiling"] == 2 and not content["data"]["partial"]
    assert content["data"]["model"] == "fox" and content["data"]["workload"]["prompt"]["median"] == 16
    assert [level["figures"]["requests"] for level in content["data"]["levels"]] == [4, 4]
    assert KEY not in (tmp_path / "r.json").read_text() + (tmp_path / "r.html").read_text().split("<pre>")[0]
    for shown in (done.out, (tmp_path / "r.md").read_text(), (tmp_path / "r.html").read_text()):
        assert "time to first token" in shown and "highest load that keeps the SLO" in shown
    assert "ceiling: 2<" in (tmp_path / "r.html").read_text()


def test_the_key_comes_from_the_environment_too(cli: Cli, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("bench", url, "--rate", "50", *SMALL).refused(1, "401")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    done = cli("bench", url, "--rate", "50", "--endpoint", "chat", *SMALL)
    assert done.code == 0, done.err
    cli("bench", url, "--rate", "50", "--model", "hare", *SMALL).refused(1, "does not serve hare; it lists fox")


def test_gates(cli: Cli, url: str, tmp_path: Path) -> None:
    gates = tmp_path / "gates.toml"
    gates.write_text("[ttft_p95]\nmax = 1e6\n[output]\nmin = 1e9\n")
    load = ("bench", url, "--api-key", KEY, "--concurrency", "1", *SMALL, "--gate", gates)
    cli(*load).refused(3, "output")
    gates.write_text("[e2e]\nmax = 1\n")
    cli(*load).refused(2, "no e2e is measured", "ttft_p95")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--rate", "0"), "--rate"),
        (("--rate", "1,x"), "--rate"),
        (("--rate", "2", "--concurrency", "2"), "one rhythm"),
        (("--burst", "2"), "--burst"),
        (("--rate", "2", "--burst", "0"), "--burst"),
        (("--turns", "0"), "--turns"),
        (("--timeout", "0"), "--timeout"),
        (("--slo", "ttft"), "--slo"),
        (("--slo", "e2e=1s"), "--slo"),
        (("--concurrency", "4,2"), "rise"),
        (("--endpoint", "audio"), "--endpoint"),
        (("--prompt", "lognormal:9"), "--prompt"),
        (("--output", "1/x"), "--output"),
        (("--prefixes", "2"), "--prefix-tokens"),
        (("--timeout", "-1"), "--timeout"),
        (("--threads", "1"), "--threads"),
        (("--cpu-list", "0"), "--cpu-list"),
        (("--static",), "--static"),
        (("--serve",), "--serve"),
    ],
)
def test_contradictions(cli: Cli, options: tuple[str, ...], word: str) -> None:
    cli("bench", "http://127.0.0.1:9", *options).refused(2, word)


def test_what_is_for_a_model_and_what_is_for_a_server(cli: Cli, tiny_packed: Path, tiny_model: Path) -> None:
    cli("bench", "http://127.0.0.1:9").refused(1, "cannot be reached")
    cli("bench", "ftp://127.0.0.1:9").refused(2, "a server is named like")
    cli("bench", tiny_packed, "--against", tiny_model, "--rate", "1").refused(2, "--against", "--rate")
    cli("bench", tiny_packed, "--static", "--rate", "1").refused(2, "--static", "--rate")
    cli("bench", tiny_packed, "--static", "--concurrency", "4,8").refused(2, "--static")
    cli("bench", tiny_packed, "--static", "--output", "5/9000").refused(2, "9000", "context")
    cli("bench", tiny_packed, "--prompt", "lognormal:9:1").refused(2, "--prompt")
    cli("bench", "nowhere/at-all", "--serve").refused(1, "nowhere")


def test_the_engine_without_its_model(cli: Cli, tiny_packed: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    options = ("--without-model", "--concurrency", "1,3", "--prompt", "20,70", "--output", 2, "--repeats", 1)
    done = cli("bench", tiny_packed, *options, "--json", report)
    assert done.code == 0, done.err
    data = json.loads(report.read_text())
    loads = data["data"]["loads"]
    assert [(each["requests"], each["context"]) for each in loads] == [(1, 20), (1, 70), (3, 20), (3, 70)]
    for each in loads:
        assert min(each["parts"].values()) > 0 and sum(each["parts"].values()) == pytest.approx(each["step"])
        assert each["step"] <= each["slowest"]
    cli("bench", tiny_packed, "--without-model", "--rate", "1").refused(2, "--without-model", "--rate")
    cli("bench", tiny_packed, "--without-model", "--threads", "1").refused(2, "--without-model", "--threads")
    cli("bench", tiny_packed, "--without-model", "--output", "5,6").refused(2, "one --output")
    cli("bench", tiny_packed, "--without-model", "-tp", 2).refused(2, "--without-model", "ranks")
    cli("bench", "kernels", "--without-model").refused(2, "kernels takes no load")
    cli("bench", "kernels", "-pp", 2).refused(2, "no ranks")


def test_static_batching_beside_continuous(cli: Cli, tiny_packed: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    options = ("--static", "--concurrency", 4, "--prompt", 8, "--output", "1/2/3/10", "--requests", 24)
    done = cli("bench", tiny_packed, *options, "--json", report)
    assert done.code == 0, done.err
    data = json.loads(report.read_text())["data"]
    assert data["continuous"]["tokens"] == 24 * 4 and data["static"]["tokens"] == 16 * 4, "four batches are enough"
    assert "bound, longest over mean" in done.out


@pytest.mark.slow
def test_a_model_is_served_and_loaded(cli: Cli, tiny_packed: Path) -> None:
    done = cli("bench", tiny_packed, "--concurrency", "2", "--threads", "1", *SMALL)
    assert done.code == 0, done.err
    assert "on a free port" in done.err and "time to first token" in done.out
    ranks = ("-tp", 2, "-pp", 2, "--threads", "1")
    done = cli("bench", tiny_packed, *ranks, "--concurrency", 2, "--output", 4, "--repeats", 1)
    assert done.code == 0, done.err
