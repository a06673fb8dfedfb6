"""Reports: one JSON form for everything measured, and its rendering as Markdown. Measures nothing itself."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.files import write_atomically
from qserve.evals.gate import GateReport
from qserve.kernels.threads import default_threads


@dataclass(frozen=True)
class Section:
    """A table with a heading; cells are text already rounded for reading."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """``kind``: quality or throughput. ``data`` holds every figure unrounded, ``sections`` what a person reads."""

    kind: str
    title: str
    command: str
    data: dict[str, Any]
    sections: tuple[Section, ...]
    gates: tuple[GateReport, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: environment())

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "schema": 1}

    def to_markdown(self) -> str:
        sections = list(self.sections)
        if self.gates:
            rows = tuple(
                (
                    gate.metric,
                    f"{gate.value:.4g}",
                    f"{'≤' if gate.kind == 'at_most' else '≥'} {gate.limit:.4g}",
                    "passed" if gate.passed else f"FAILED by {gate.missed_by:.4g}",
                )
                for gate in self.gates
            )
            sections.append(Section("Gates", ("gate", "measured", "limit", "verdict"), rows))
        lines = [f"# {self.title}", "", f"    {self.command}", ""]
        lines += [", ".join(f"{key} {value}" for key, value in self.environment.items()), ""]
        for section in sections:
            lines += [f"## {section.title}", "", _row(section.header), _row(["---"] * len(section.header))]
            lines += [*map(_row, section.rows), ""]
        return "\n".join(lines)

    def write(self, json_path: Path | None, markdown_path: Path | None) -> None:
        """Either path may be None. Raises ``QServeError`` where a file cannot be written."""
        content = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        for path, text in ((json_path, content), (markdown_path, self.to_markdown())):
            if path is not None:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, text.encode())
                except OSError as error:
                    raise QServeError(f"cannot write {path}: {error.strerror or error}") from None


def quality_report(card: QualityCard, name: str, command: str, gates: Sequence[GateReport] = ()) -> Report:
    """The report of a quality card."""
    rows = (
        ("perplexity", f"{card.perplexity_base:.3f}", f"{card.perplexity:.3f} ({card.perplexity_increase:+.2%})"),
        ("KL divergence, mean (nats)", "0", f"{card.kl_mean:.4f}"),
        ("KL divergence, median", "0", f"{card.kl_median:.4f}"),
        ("KL divergence, p90", "0", f"{card.kl_p90:.4f}"),
        ("top-1 agreement", "100 %", f"{card.top1_agreement:.2%}"),
    )
    title = f"{card.tokens:,} tokens of {card.data_name}, windows of {card.window:,}; {card.kernel_path}"
    section = Section(title, ("", card.base_name, name), rows)
    return Report("quality", f"Quality of {name}", command, {"card": card.to_json()}, (section,), tuple(gates))


def environment() -> dict[str, str]:
    """What a figure depends on besides the code."""
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


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
