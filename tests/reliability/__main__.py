"""The command: runs cases, prints a table of each, writes JSON; exit code 3 where a limit is missed."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from qserve.evals.report import environment
from tests.reliability.cases import CASES, Figure, Options
from tests.tiny_model import save_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="may be given several times; default: all")
    parser.add_argument("--model", default="tiny", help="tiny (made at random), demo, or what qserve run takes")
    parser.add_argument("--requests", type=int, default=10_000, help="of the case aborts")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement with a duration")
    parser.add_argument("--concurrency", type=int, default=32, help="clients at once")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure")
    given = parser.parse_args()
    if min(given.requests, given.concurrency) < 1 or given.seconds <= 0:
        parser.error("--requests, --seconds and --concurrency must be positive")
    results: dict[str, list[Figure]] = {}
    with contextlib.ExitStack() as stack:
        model = given.model
        if model == "tiny":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qserve-tiny-"))
            model = str(save_tiny_model(Path(folder)))
        options = Options(model, given.requests, given.seconds, given.concurrency)
        if given.model != "tiny":
            options = replace(options, kv_cache_memory=256 << 20)
        for name in given.case or CASES:
            results[name] = CASES[name](options)
            print(f"{name}: {CASES[name].__doc__}")
            for figure in results[name]:
                print(f"  {figure.name:<44}{figure.value:>12.4g}  {_verdict(figure)}", flush=True)
    passed = all(figure.passed for figures in results.values() for figure in figures)
    if given.json:
        content = {
            "kind": "reliability",
            "command": shlex.join(["python", "-m", "tests.reliability", *sys.argv[1:]]),
            "environment": environment(),
            "model": given.model,
            "passed": passed,
            "cases": {name: [vars(f) | {"passed": f.passed} for f in figures] for name, figures in results.items()},
        }
        given.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    return 0 if passed else 3


def _verdict(figure: Figure) -> str:
    limits = [
        f"{sign} {limit:g}" for sign, limit in (("<=", figure.at_most), (">=", figure.at_least)) if limit is not None
    ]
    return f"{' and '.join(limits)}: {'passed' if figure.passed else 'MISSED'}" if limits else ""


if __name__ == "__main__":
    sys.exit(main())
