"""``Report``: one form for all measurements, as JSON and as Markdown. It measures and draws nothing itself.

``docs/report.schema.json`` describes the JSON. Needs no torch.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from qserve.evals.gate import GateReport

SCHEMA = 2


@dataclass(frozen=True)
class Metric:
    """A figure by which two runs of the same kind are compared.

    name         the same in every run, as ``kl_mean``
    unit         as nats, tok/s, s; "" for a share or a count
    better       which direction is an improvement; None for a figure that is only reported
    low, high    its 95 % confidence interval, both or neither
    samples      the numbers behind it, one for each window, document or repeat
    pairing      if it is the same in two reports, their samples belong to the same windows or documents
    """

    name: str
    value: float
    unit: str = ""
    better: Literal["lower", "higher"] | None = None
    low: float | None = None
    high: float | None = None
    samples: tuple[float, ...] = ()
    pairing: str = ""


def intervals_of(metrics: Iterable[Metric]) -> dict[str, tuple[float, float]]:
    """The 95 % intervals of those metrics that have one, by name."""
    return {each.name: (each.low, each.high) for each in metrics if each.low is not None and each.high is not None}


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
    """Some series, to be drawn on a page.

    kind     line; bar: the series stand side by side at each x; grid: each series is a row of coloured cells; scatter:
             the first series is a line, each other one is a point with its name
    ticks    the names of x = 0, 1, 2, ... where x is not a quantity
    marks    vertical lines, as (x, label)
    """

    title: str
    caption: str
    x: str
    y: str
    series: tuple[Series, ...]
    kind: Literal["line", "bar", "grid", "scatter"] = "line"
    ticks: tuple[str, ...] = ()
    y_right: str = ""
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """``kind``: quality, throughput, simulation, plan and so on; only reports of one kind can be compared. ``data``
    holds every figure unrounded, ``sections`` and ``plots`` are for people, and runs are compared by ``metrics``."""

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
        """Names and texts come from strangers' models, so they are escaped."""
        lines = [f"# {_escaped(self.title)}", "", f"    {visible(self.command)}", ""]
        lines += [", ".join(f"{key} {value}" for key, value in self.environment.items()), ""]
        for section in self.tables():
            lines += [f"## {_escaped(section.title)}", "", _row(map(_escaped, section.header))]
            lines += [_row(["---"] * len(section.header))]
            lines += [*(_row(map(_escaped, row)) for row in section.rows), ""]
        return "\n".join(lines)

    def tables(self) -> tuple[Section, ...]:
        """The sections, and the gates as one more if there are any."""
        if not self.gates:
            return self.sections
        rows = tuple(
            (
                gate.metric,
                f"{gate.value:.4g}",
                "" if gate.bound is None else f"{gate.bound:.4g}",
                f"{'≤' if gate.kind == 'at_most' else '≥'} {gate.limit:.4g}",
                "passed" if gate.passed else f"FAILED by {gate.missed_by:.4g}",
            )
            for gate in self.gates
        )
        return (*self.sections, Section("Gates", ("gate", "measured", "95 % bound", "limit", "verdict"), rows))


def environment() -> dict[str, str]:
    """The conditions, other than the code, on which a figure depends."""
    import torch

    from qserve.kernels.threads import default_threads

    return {
        "machine": f"{_processor()}, {default_threads()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "qserve": version("qserve-llm"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def visible(text: str, space: str = " ") -> str:
    """One line: breaks as signs; characters without a glyph, or that would turn the line around, as their codes."""
    signs = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": space}
    return "".join(signs.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)


def _escaped(text: str) -> str:
    """Underscores inside words need no escape."""
    return re.sub(r"[\\`*\[\]<>|~&#]|(?<!\w)_|_(?!\w)", r"\\\g<0>", visible(text))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
