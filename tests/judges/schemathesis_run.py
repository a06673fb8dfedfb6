"""Schemathesis against a real server: ``python tests/judges/schemathesis_run.py ENVIRONMENT [--cases 5000]``.

ENVIRONMENT is the directory of an environment that has schemathesis in it, as ``tests/environments.py judges DIR
schemathesis`` makes in ``DIR/schemathesis``. Requests are made from ``/openapi.json``, valid and broken ones, until
there were enough of them. A 5xx fails the run; so do a status, a content type or a body that the document does not
allow, a broken request that is not refused, and a route that asks for no key.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


@contextmanager
def serving(key: str, routed: bool) -> Iterator[str]:
    """The address of a server, or of a router before two, that is there for a while."""
    command = [sys.executable, "-m", "tests.judges.server", key, *["routed"] * routed]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        # Before its address the training of its tokenizer prints empty lines.
        url = next((line.strip() for line in process.stdout if line.startswith("http")), None)
        if url is None:
            raise SystemExit("the server did not start")
        try:
            yield url
        finally:
            process.stdin.close()


def round_of(program: Path, url: str, key: str, seed: int, examples: int, left_out: list[str]) -> dict[str, Any]:
    """One run of schemathesis; its report."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [
            program, "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {key}", "--mode", "all",
            "--max-examples", str(examples), "--seed", str(seed), "--phases", "examples,coverage,fuzzing",
            "--checks", ",".join(CHECKS), "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all",
            "--request-timeout", "60", *left_out, "--report", "json", "--report-json-path", report,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"schemathesis itself failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        if done.returncode:
            print(done.stdout)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--cases", type=int, default=5000, help="requests at least")
    parser.add_argument("--examples", type=int, default=400, help="random requests to each route in a round")
    parser.add_argument("--routed", action="store_true", help="two servers behind a router")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones count on")
    arguments = parser.parse_args()
    program, key = arguments.environment.resolve() / "bin" / "st", secrets.token_hex(8)
    # A router shows its servers' document, but their engines only themselves.
    left_out = ["--exclude-path", "/v1/engine"] if arguments.routed else []
    cases, operations, failures = 0, 0, Counter[str]()
    with serving(key, arguments.routed) as url:
        seed = arguments.seed
        while cases < arguments.cases:
            report = round_of(program, url, key, seed, arguments.examples, left_out)
            if not report["test_cases"]["generated"]:
                raise SystemExit("schemathesis made no requests")
            cases += report["test_cases"]["generated"]
            operations = report["operations"]["tested"]
            failures.update({failure["title"]: failure["count"] for failure in report["failures"]})
            if report["errors"]:
                failures["errors of schemathesis"] += len(report["errors"])
            seed += 1
    print(f"{cases} cases on {operations} routes, {failures.total()} failures")
    for title, count in failures.most_common():
        print(f"  {count} x {title}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
