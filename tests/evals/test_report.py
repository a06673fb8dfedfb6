"""One form for every report, as JSON and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import QServeError
from qserve.evals.gate import judge, quality_gates
from qserve.evals.report import Report, Section, quality_report

CARD = QualityCard(
    base_name="base", base_sha256="0" * 64, data_name="text", data_sha256="1" * 64, tokens=1234, window=10,
    perplexity_base=10.0, perplexity=10.5, kl_mean=0.05, kl_median=0.04, kl_p90=0.1, top1_agreement=0.9,
    kernel_path="reference", created="2026-01-01",
)  # fmt: skip


def test_json_holds_everything_unrounded(tmp_path: Path) -> None:
    gates = judge(quality_gates(max_kl=0.01, min_top1="80%"), CARD)
    report = quality_report(CARD, "w4", "qserve eval w4", gates)
    path = tmp_path / "new" / "r.json"
    report.write(path, None)
    content = json.loads(path.read_text())
    assert QualityCard.from_json(content["data"]["card"]) == CARD
    assert content["schema"] == 1 and content["kind"] == "quality" and content["passed"] is False
    assert [(gate["metric"], gate["passed"]) for gate in content["gates"]] == [
        ("kl_mean", False), ("top1_agreement", True)
    ]  # fmt: skip
    assert {"machine", "python", "torch", "transformers", "qserve"} <= content["environment"].keys()
    assert [entry.name for entry in path.parent.iterdir()] == ["r.json"]


def test_markdown_is_made_of_whole_tables(tmp_path: Path) -> None:
    gates = judge(quality_gates(max_kl=0.01, min_top1="80%"), CARD)
    quality_report(CARD, "w4", "qserve eval w4", gates).write(None, tmp_path / "r.md")
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert text.startswith("# Quality of w4\n") and "    qserve eval w4\n" in text
    assert "| perplexity | 10.000 | 10.500 (+5.00%) |" in text
    assert "| kl_mean | 0.05 | ≤ 0.01 | FAILED by 0.04 |" in text
    assert "| top1_agreement | 0.9 | ≥ 0.8 | passed |" in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_without_gates_a_report_passes() -> None:
    report = Report("throughput", "Speed", "qserve bench", {}, (Section("s", ("a",), (("1",),)),))
    assert report.passed and "Gates" not in report.to_markdown()


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QServeError, match="cannot write"):
        quality_report(CARD, "w4", "").write(tmp_path / "file" / "r.json", None)
