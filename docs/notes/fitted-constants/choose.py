"""Choose a constant of ``quantize/fitted.py`` on one text and report on another:

    python docs/notes/fitted-constants/choose.py SHRINKAGE 0,0.05,0.1,0.2,0.4 demo DIR \\
        --calibration wiki.valid.head --validation wiki.valid.tail --test wiki.test.raw --options "--effort fast"

Each value makes a checkpoint, calibrated on one text and measured on the first ``--tokens`` of the validation text. The
value of least mean divergence there is chosen. Only it and the present value are measured on the whole test text, and
compared by ``qserve report``, whose intervals pair the two window by window. ``--options`` are those of
``qserve quantize``. Reports that are in DIR already are not made again.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from qserve.calibration.text import load_text
from qserve.checkpoint.source import open_model
from qserve.cli import app
from qserve.quantize import fitted

NAMES = [name for name, each in vars(fitted).items() if isinstance(each, fitted.Fitted)]


def main(arguments: list[str] | None = None) -> float:
    """Returns the value that was chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("values", type=lambda text: [float(value) for value in text.split(",")])
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    for text in ("calibration", "validation", "test"):
        parser.add_argument(f"--{text}", required=True)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--options", type=shlex.split, default=[])
    given = parser.parse_args(arguments)
    present = getattr(fitted, given.name).value
    tokenizer = open_model(given.model).tokenizer()
    whole = len(load_text(given.test, "evaluate").tokens(tokenizer)) // given.window * given.window
    given.directory.mkdir(parents=True, exist_ok=True)

    def measured(value: float, text: str, tokens: int) -> Path:
        report = given.directory / f"{given.name}-{value:g}-{text}.json"
        checkpoint = given.directory / f"{given.name}-{value:g}"
        if report.exists():
            return report
        if not checkpoint.exists():
            object.__setattr__(getattr(fitted, given.name), "value", value)
            try:
                run("quantize", given.model, checkpoint, "--calibration", given.calibration, *given.options)
            finally:
                object.__setattr__(getattr(fitted, given.name), "value", present)
        run("eval", checkpoint, "--against", given.model, "--data", getattr(given, text), "--tokens", tokens,
            "--window", given.window, "--no-card", "--json", report)  # fmt: skip
        return report

    values = dict.fromkeys([*given.values, present])
    found = {value: kl(measured(value, "validation", given.tokens)) for value in values}
    for value, divergence in found.items():
        print(f"{given.name} {value:g}: {divergence:.5f} on the validation text")
    chosen = min(found, key=lambda value: found[value])
    reports = [measured(value, "test", whole) for value in (present, chosen)]
    print(f"chosen: {chosen:g}, now {present:g}; the whole test text, {whole:,} tokens:")
    run("report", *reports)
    return chosen


def kl(report: Path) -> float:
    metrics = {each["name"]: each["value"] for each in json.loads(report.read_text())["metrics"]}
    return float(metrics["kl_mean"])


def run(*command: object) -> None:
    app([str(each) for each in command], standalone_mode=False)


if __name__ == "__main__":
    main()
