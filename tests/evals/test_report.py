"""One form for every report, as JSON and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import DataError, QServeError
from qserve.evals.gate import judge, quality_gates
from qserve.evals.quality_report import quality_report
from qserve.evals.report import Metric, Plot, Report, Section, Series
from qserve.evals.report_files import read_report, write_report

CARD = QualityCard(
    base_name="base", base_sha256="0" * 64, data_name="text", data_sha256="1" * 64, tokens=1234, window=10,
    perplexity_base=10.0, perplexity=10.5, kl_mean=0.05, kl_median=0.04, kl_p90=0.1, top1_agreement=0.9,
    kernel_path="reference", created="2026-01-01",
)  # fmt: skip


def test_json_holds_everything_unrounded(tmp_path: Path) -> None:
    gates = judge(quality_gates(max_kl=0.01, min_top1="80%"), CARD)
    report = quality_report(CARD, "w4", "qserve eval w4", gates)
    path = tmp_path / "new" / "r.json"
    write_report(report, path, None)
    content = json.loads(path.read_text())
    assert QualityCard.from_json(content["data"]["card"]) == CARD
    assert content["schema"] == 2 and content["kind"] == "quality" and content["passed"] is False
    assert [(gate["metric"], gate["passed"]) for gate in content["gates"]] == [
        ("kl_mean", False), ("top1_agreement", True)
    ]  # fmt: skip
    assert {"machine", "python", "torch", "transformers", "qserve"} <= content["environment"].keys()
    assert [entry.name for entry in path.parent.iterdir()] == ["r.json"]


def test_markdown_is_made_of_whole_tables(tmp_path: Path) -> None:
    gates = judge(quality_gates(max_kl=0.01, min_top1="80%"), CARD)
    write_report(quality_report(CARD, "w4", "qserve eval w4", gates), None, tmp_path / "r.md")
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert text.startswith("# Quality of w4\n") and "    qserve eval w4\n" in text
    assert "| perplexity | 10.000 | 10.500 (+5.00%) |" in text
    assert "| kl_mean | 0.05 |  | ≤ 0.01 | FAILED by 0.04 |" in text
    assert "| top1_agreement | 0.9 |  | ≥ 0.8 | passed |" in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_without_gates_a_report_passes() -> None:
    report = Report("throughput", "Speed", "qserve bench", {}, (Section("s", ("a",), (("1",),)),))
    assert report.passed and "Gates" not in report.to_markdown()


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QServeError, match="cannot write"):
        write_report(quality_report(CARD, "w4", ""), tmp_path / "file" / "r.json", None)


SERIES = Series("<b>one</b>", (0, 1, 2), (3.0, 1.0, 2.0), (2.5, 0.5, 1.5), (3.5, 1.5, 2.5))
FULL = Report(
    "load", "Load of <i>m</i>", "qserve bench m", {"figures": [1.5]}, (Section("t", ("a", "b"), (("1", "<u>2</u>"),)),),
    environment={"machine": "x"},
    metrics=(Metric("ttft_mean", 0.12, "s", "lower", 0.1, 0.14, (0.1, 0.14), "runs"), Metric("requests", 10)),
    plots=(
        Plot("Curve", "with a mark", "requests at once", "s", (SERIES, Series("two", (0, 1), (5.0, 6.0), right=True)),
             y_right="tok/s", marks=((1.0, "limit"),)),
        Plot("Bars", "", "length", "nats", (SERIES, SERIES), "bar", ("short", "long", "longer")),
        Plot("Cells", "", "tokens", "nats", (SERIES, SERIES), "grid", ("128", "256", "512")),
        Plot("Logarithms", "", "x", "y", (Series("three", (1, 10), (1, 100)),), log_x=True, log_y=True),
    ),
)  # fmt: skip


SCHEMA: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs/report.schema.json").read_text(encoding="utf-8"))


def test_the_published_schema_describes_every_report(tmp_path: Path) -> None:
    gates = judge(quality_gates(max_kl=0.01), CARD)
    for report in (FULL, quality_report(CARD, "w4", "c", gates)):
        write_report(report, tmp_path / "r.json", None)
        jsonschema.validate(json.loads((tmp_path / "r.json").read_text()), SCHEMA)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_report(FULL, tmp_path / "r.json", None)
    assert read_report(tmp_path / "r.json") == FULL
    content = json.loads((tmp_path / "r.json").read_text())
    old = {key: value for key, value in content.items() if key not in ("metrics", "plots", "qserve")} | {"schema": 1}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert read_report(tmp_path / "old.json").metrics == ()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "not a report of qserve"),
        ('{"kind": "load", "schema": 99, "environment": {}}', "has schema 99"),
        ('{"kind": "load", "schema": 2, "environment": {}}', "damaged"),
    ],
)
def test_what_is_no_report(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(DataError, match=problem):
        read_report(tmp_path / "r.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_report(tmp_path / "none.json")


def test_the_page_shows_metrics_and_plots_and_runs_nothing(tmp_path: Path) -> None:
    write_report(FULL, None, None, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 4 and "<b>" not in text and "<i>" not in text and "<u>" not in text
    for expected in ("ttft mean", "0.12", "0.1 to 0.14", "with a mark", "&lt;u&gt;2&lt;/u&gt;", "tok/s", "limit"):
        assert expected in text, expected
    assert "<script" not in text and "src=" not in text
    first = text
    write_report(FULL, None, None, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == first
