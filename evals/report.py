"""``Report``: one form for everything measured, as JSON, as Markdown, and read back. Measures and draws nothing itself.

The JSON is described by ``docs/report.schema.json``; ``page`` makes HTML of a report. Needs no torch.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from qserve.checkpoint.errors import DataError, QServeError
from qserve.checkpoint.files import write_atomically
from qserve.evals.gate import GateReport

SCHEMA = 2


@dataclass(frozen=True)
class Metric:
    """A figure by which two runs of the same kind are compared.

    name         the same in every run, as ``kl_mean``
    unit         as nats, tok/s, s; "" for a share or a count
    better       which direction is an improvement; None for what is only told
    low, high    its 95 % confidence interval, both or neither
    samples      what it is made of, one number for each window, document or repeat
    pairing      where it is the same in two reports, their samples belong to the same windows or documents
    """

    name: str
    value: float
    unit: str = ""
    better: Literal["lower", "higher"] | None = None
    low: float | None = None
    high: float | None = None
    samples: tuple[float, ...] = ()
    pairing: str = ""


@dataclass(frozen=True)
class Section:
    """A table with a heading; cells are text already rounded for reading."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Series:
    """Points of one colour; ``low`` and ``high`` are a band or bars of error around ``y``, or empty.

    ``right``: measured on the axis at the right.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    right: bool = False


@dataclass(frozen=True)
class Plot:
    """What a page draws of some series.

    kind     line; bar: the series stand beside each other at each x; grid: each series is a row of coloured cells
    ticks    the names of x = 0, 1, 2, ... where x is no quantity
    marks    vertical lines, as (x, what it says)
    """

    title: str
    caption: str
    x: str
    y: str
    series: tuple[Series, ...]
    kind: Literal["line", "bar", "grid"] = "line"
    ticks: tuple[str, ...] = ()
    y_right: str = ""
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """``kind``: quality, throughput, simulation, plan and so on: only reports of one kind compare. ``data`` holds
    every figure unrounded, ``sections`` and ``plots`` are what a person sees, ``metrics`` what runs are compared by."""

    kind: str
    title: str
    command: str
    data: dict[str, Any]
    sections: tuple[Section, ...]
    gates: tuple[GateReport, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: environment())
    metrics: tuple[Metric, ...] = ()
    plots: tuple[Plot, ...] = ()

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "qserve": version("qserve-llm"), "schema": SCHEMA}

    def to_markdown(self) -> str:
        """Names and texts come from models of strangers: they are escaped."""
        lines = [f"# {_escaped(self.title)}", "", f"    {visible(self.command)}", ""]
        lines += [", ".join(f"{key} {value}" for key, value in self.environment.items()), ""]
        for section in self.tables():
            lines += [f"## {_escaped(section.title)}", "", _row(map(_escaped, section.header))]
            lines += [_row(["---"] * len(section.header))]
            lines += [*(_row(map(_escaped, row)) for row in section.rows), ""]
        return "\n".join(lines)

    def tables(self) -> tuple[Section, ...]:
        """The sections, and the gates as one more where there are any."""
        if not self.gates:
            return self.sections
        rows = tuple(
            (
                gate.metric,
                f"{gate.value:.4g}",
                f"{'≤' if gate.kind == 'at_most' else '≥'} {gate.limit:.4g}",
                "passed" if gate.passed else f"FAILED by {gate.missed_by:.4g}",
            )
            for gate in self.gates
        )
        return (*self.sections, Section("Gates", ("gate", "measured", "limit", "verdict"), rows))

    def write(self, json_path: Path | None, markdown_path: Path | None, html_path: Path | None = None) -> None:
        """Any path may be None. Raises ``QServeError`` where a file cannot be written."""
        if json_path is not None:
            save(json_path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        if markdown_path is not None:
            save(markdown_path, self.to_markdown())
        if html_path is not None:
            from qserve.evals.page import page  # draws, with a library that the other two need not wait for

            save(html_path, page(self))


def save(path: Path, text: str) -> None:
    """The file as it was or as it shall be; its folder is made. Raises ``QServeError`` where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise QServeError(f"cannot write {path}: {error.strerror or error}") from None


def read_report(path: Path) -> Report:
    """A report as ``write`` stored it, also one of an older qserve. Raises ``DataError`` for anything else."""
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


def environment() -> dict[str, str]:
    """What a figure depends on besides the code."""
    import torch

    from qserve.kernels.threads import default_threads

    return {
        "machine": f"{_processor()}, {default_threads()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "qserve": version("qserve-llm"),
    }


def _plot(content: dict[str, Any]) -> Plot:
    fields = _tuples(content)
    series = tuple(Series(**_tuples(each)) for each in content["series"])
    return Plot(**{**fields, "series": series, "marks": tuple((x, text) for x, text in content["marks"])})


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def visible(text: str, space: str = " ") -> str:
    """One line: breaks as signs, what has no glyph (and what would turn the line around) as its code."""
    signs = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": space}
    return "".join(signs.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)


def _escaped(text: str) -> str:
    """Underscores inside words need no escape."""
    return re.sub(r"[\\`*\[\]<>|~&#]|(?<!\w)_|_(?!\w)", r"\\\g<0>", visible(text))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
