"""``qserve compare``: several checkpoints of one base, from their cards or measured anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qserve.checkpoint.card import QualityCard, read_card, write_card
from qserve.evals.pareto import Candidate, front, pareto_report
from qserve.evals.report_files import read_report

Cli = Callable[..., Any]
MEASURED = ("--tokens", 256, "--window", 32)


def card(kl: float) -> QualityCard:
    return QualityCard("base", "b", "text", "t", 100, 10, 20.0, 21.0, kl, kl, kl, 0.9, "native", "2026-11-25")


def test_the_front_is_what_no_other_beats() -> None:
    small, close = Candidate("small", 100, card(0.2), {1: 50.0}), Candidate("close", 200, card(0.1), {1: 40.0})
    beaten, fast = Candidate("beaten", 210, card(0.1), {1: 39.0}), Candidate("fast", 210, card(0.3), {1: 90.0})
    assert close.beats(beaten) and not small.beats(close) and not close.beats(close)
    assert [each.name for each in front([fast, beaten, close, small])] == ["small", "close", "fast"]
    report = pareto_report([fast, beaten, close, small], "compare")
    assert [row[0] for row in report.sections[0].rows] == ["small", "close", "beaten", "fast"]
    assert [row[-1] for row in report.sections[0].rows] == ["none", "none", "close", "none"]
    assert report.data["front"] == ["small", "close", "fast"]
    assert report.plots[0].series[0].x == (0.0001, 0.0002, 0.00021)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("\n".join(f"word {n} and {n * n} of them" for n in range(400)))
    return file


@pytest.fixture
def two(cli: Cli, tiny_model: Path, tiny_packed: Path, text: Path, tmp_path: Path) -> tuple[Path, Path]:
    """One in 4 bits and one in 8, with cards of the same windows."""
    four, eight = shutil.copytree(tiny_packed, tmp_path / "four"), tmp_path / "eight"
    options = ("--bits", 8, "--method", "rtn", "--group-size", 16, "--calibration", "none")
    assert cli("quantize", tiny_model, eight, *options).code == 0
    for model in (four, eight):
        assert cli("eval", model, "--against", tiny_model, "--data", text, *MEASURED).code == 0
    return four, eight


def test_cards_and_measuring_anew_agree(
    cli: Cli, tiny_model: Path, two: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    four, eight = two
    files = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    done = cli("compare", eight, four, "--concurrency", "1,2", *files)
    assert done.code == 0, done.err
    report = read_report(tmp_path / "a.json")
    assert [each["name"] for each in report.data["checkpoints"]] == [str(four), str(eight)]
    assert {level for each in report.data["checkpoints"] for level in each["rates"]} == {"1", "2"}
    assert str(eight) in report.data["front"] and "tok/s, 2 at once" in report.sections[0].header
    assert "<svg" in (tmp_path / "a.html").read_text() and "not beaten" in (tmp_path / "a.html").read_text()
    again = ("--against", tiny_model, "--data", text, *MEASURED, "--concurrency", "none")
    done = cli("compare", four, eight, *again, "--json", tmp_path / "b.json")
    assert done.code == 0, done.err
    cards = [json.loads((tmp_path / name).read_text())["data"]["checkpoints"] for name in ("a.json", "b.json")]
    assert [each["card"]["kl_mean"] for each in cards[0]] == [each["card"]["kl_mean"] for each in cards[1]]
    assert [each["rates"] for each in cards[1]] == [{}, {}]


def test_what_does_not_compare_is_refused(cli: Cli, two: tuple[Path, Path], tiny_packed: Path) -> None:
    four, eight = two
    cli("compare", four, four).refused(2, "two or more checkpoints")
    cli("compare", four, eight, "--tokens", 64).refused(2, "--tokens goes with --against")
    cli("compare", four, tiny_packed).refused(1, "has no quality card; give --against its base")
    found = read_card(eight)
    assert found is not None
    write_card(eight, replace(found, tokens=found.tokens + 1, data_sha256="0"))
    cli("compare", four, eight).refused(1, "differ in text, number of tokens; give --against BASE")
    shutil.copy(four / "quality_card.json", eight / "quality_card.json")
    cli("compare", four, eight).refused(1, "other weights")
