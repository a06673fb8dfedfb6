"""Reports as files: written as JSON, Markdown and HTML, and read back from JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import DataError, QServeError
from qserve.checkpoint.files import write_atomically
from qserve.evals.gate import GateReport
from qserve.evals.report import SCHEMA, Metric, Plot, Report, Section, Series


def write_report(
    report: Report, json_path: Path | None, markdown_path: Path | None, html_path: Path | None = None
) -> None:
    """Write the files whose paths are not None. Raises ``QServeError`` where one cannot be written."""
    if json_path is not None:
        save(json_path, json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n")
    if markdown_path is not None:
        save(markdown_path, report.to_markdown())
    if html_path is not None:
        from qserve.evals.page import page  # draws, with a library that the other two need not wait for

        save(html_path, page(report))


def save(path: Path, text: str) -> None:
    """Write the file whole or not at all; its folder is made. Raises ``QServeError`` where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise QServeError(f"cannot write {path}: {error.strerror or error}") from None


def read_report(path: Path) -> Report:
    """A report as ``write_report`` stored it, even by an older qserve. Raises ``DataError`` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not a report: it is not JSON") from None
    if not isinstance(content, dict) or not {"kind", "schema", "environment"} <= content.keys():
        raise DataError(f"{path} is not a report of qserve")
    if content["schema"] not in range(1, SCHEMA + 1):
        raise DataError(f"{path} has schema {content['schema']!r}, this qserve reads 1 to {SCHEMA}; update it")
    try:
        report = Report(
            kind=str(content["kind"]),
            title=str(content["title"]),
            command=str(content["command"]),
            data=dict(content["data"]),
            sections=tuple(
                Section(each["title"], tuple(each["header"]), tuple(map(tuple, each["rows"])))
                for each in content["sections"]
            ),
            gates=tuple(GateReport(**each) for each in content["gates"]),
            environment=dict(content["environment"]),
            metrics=tuple(Metric(**{**each, "samples": tuple(each["samples"])}) for each in content.get("metrics", ())),
            plots=tuple(map(_plot, content.get("plots", ()))),
        )
        for metric in report.metrics:
            values = [metric.value, metric.low, metric.high, *metric.samples]
            if not all(value is None or math.isfinite(value) for value in values):
                raise ValueError
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path} is a damaged report: a field is missing or of the wrong type") from None
    return report


def _plot(content: dict[str, Any]) -> Plot:
    fields = _tuples(content)
    series = tuple(Series(**_tuples(each)) for each in content["series"])
    return Plot(**{**fields, "series": series, "marks": tuple((x, text) for x, text in content["marks"])})


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
