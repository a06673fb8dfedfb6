"""One table of what qserve serves a model as: ``python tests/peers/formats.py MODEL TEXT TEST DIR [--json REPORT]``.

FP16, INT8, GPTQ, AWQ, AWQ with GPTQ, and FP8: perplexity and divergence on TEST, bytes of the weight files, and served
tokens/s with 1 and 8 requests at once. Calibrated on TEXT. Checkpoints and reports that are in DIR already are not made
again; speeds are measured one after the other at the end, so that they belong to the same minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qserve.checkpoint.source import open_model
from qserve.cli import app

ROWS = {
    "FP16": None,
    "INT8 (weights)": ["--bits", "8", "--method", "rtn"],
    "INT8 (W8A8)": ["--scheme", "w8a8"],
    "GPTQ": ["--method", "gptq"],
    "AWQ": ["--method", "awq", "--asym", "--format", "awq"],
    "AWQ + GPTQ": ["--method", "awq+gptq", "--asym", "--format", "awq"],
    "FP8": ["--scheme", "fp8"],
}
CONCURRENCY = (1, 8)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("test")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--samples", default="128")
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--tokens", default="16384")
    parser.add_argument("--window", default="1024")
    parser.add_argument("--prompt", default="64")
    parser.add_argument("--output", default="64")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    models: dict[str, str] = {}
    for name, options in ROWS.items():
        out = given.directory / "".join(letter for letter in name.lower() if letter.isalnum())
        models[name] = given.model if options is None else str(out)
        if options is not None and not out.exists():
            grouped = [] if "--scheme" in options else ["--group-size", given.group_size]
            calibrated = ["--calibration", given.text, "--samples", given.samples]
            run("quantize", given.model, out, *calibrated, *options, *grouped)
        report = out.with_suffix(".quality.json")
        if not report.exists():
            run("eval", models[name], "--against", given.model, "--data", given.test, "--tokens", given.tokens,
                "--window", given.window, "--no-card", "--json", report)  # fmt: skip
    rows = []
    for name, model in models.items():
        at = given.directory / "".join(letter for letter in name.lower() if letter.isalnum())
        quality = json.loads(at.with_suffix(".quality.json").read_text())["data"]["card"]
        speed = at.with_suffix(".speed.json")
        run("bench", model, "--concurrency", ",".join(map(str, CONCURRENCY)), "--prompt", given.prompt, "--output",
            given.output, "--json", speed)  # fmt: skip
        metrics = {each["name"]: each["value"] for each in json.loads(speed.read_text())["metrics"]}
        source = open_model(model)
        rows.append({
            "weights": name, "perplexity": quality["perplexity"], "kl": quality["kl_mean"],
            "bytes": 2 * source.parameters() if source.spec is None else source.stored_bytes(),
            **{f"tokens/s at {n}": metrics[f"output_rate/{n}"] for n in CONCURRENCY},
        })  # fmt: skip
    rates = [f"tokens/s at {n}" for n in CONCURRENCY]
    print("| weights | perplexity | KL | MB |", " | ".join(rates), "|")
    print("|---" * (4 + len(rates)) + "|")
    for row in rows:
        speeds = " | ".join(f"{row[rate]:,.0f}" for rate in rates)
        print(f"| {row['weights']} | {row['perplexity']:.2f} | {row['kl']:.4f} | {row['bytes'] / 1e6:.1f} | {speeds} |")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def run(*command: object) -> None:
    app([str(each) for each in command], standalone_mode=False)


if __name__ == "__main__":
    main()
