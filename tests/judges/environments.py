"""The environments of the judges: ``python tests/judges/environments.py DIR [NAME...]`` makes them in DIR.

Python tools get a virtual environment each, ``DIR/NAME/bin/python``; the JavaScript one a folder with its
``node_modules``. What is complete is left alone, and what cannot be made here is said and passed by: its tests skip.
Set ``QSERVE_JUDGES=DIR`` to run the tests with them: ``pytest tests/judges -m judges``. Exits with 1 where none could
be made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """``packages`` from PyPI, whose ``imports`` must succeed at the end; or, with ``node``, from npm."""

    packages: tuple[str, ...]
    imports: tuple[str, ...] = ()
    node: bool = False


ENVIRONMENTS = {
    "javascript": Environment(("openai@7.57.0",), node=True),
    "clients": Environment(
        ("litellm==1.106.2", "langchain-openai==1.7.3", "instructor==1.17.0"),
        ("litellm", "langchain_openai", "instructor"),
    ),
    "lm-eval": Environment(("lm-eval[api]==0.4.13", "transformers>=5,<6"), ("lm_eval", "transformers")),
    "giraffe": Environment(("giraffe-llm==0.1.0a1",), ("giraffe",)),
    "schemathesis": Environment(("schemathesis==4.32.5",), ("schemathesis",)),
    "deploy": Environment(
        ("kubernetes-validate==1.37.0", "promql-parser==0.12.0"), ("kubernetes_validate", "promql_parser")
    ),
    "guidellm": Environment(("guidellm==0.8.1", "torch>=2.11,<2.14"), ("guidellm",)),
}
COMPLETE = "complete.json"


def make(directory: Path, name: str) -> None:
    """Make ``directory / name`` unless it is there already, made from the same pins."""
    environment, home = ENVIRONMENTS[name], directory / name
    pins = json.dumps(environment.packages)
    if (home / COMPLETE).exists() and (home / COMPLETE).read_text(encoding="utf-8") == pins:
        print(f"{name}: complete already")
        return
    print(f"{name}: making {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    if environment.node:
        home.mkdir(parents=True)
        (home / "package.json").write_text('{"private": true, "type": "module"}', encoding="utf-8")
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--silent")
        subprocess.run(["npm", "install", *options, *environment.packages], cwd=home, check=True)
    else:
        venv.create(home, with_pip=True)
        python = home / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *environment.packages], check=True)
        settings = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        subprocess.run([python, "-c", f"import {', '.join(environment.imports)}"], check=True, env=settings)
    (home / COMPLETE).write_text(pins, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of {', '.join(ENVIRONMENTS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(ENVIRONMENTS):
        parser.error(f"unknown environment {', '.join(sorted(unknown))}; known: {', '.join(ENVIRONMENTS)}")
    names = arguments.names or list(ENVIRONMENTS)
    failed = []
    for name in names:
        try:
            make(arguments.directory.resolve(), name)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            failed.append(name)
            print(f"{name}: failed ({error})", file=sys.stderr)
    return 1 if len(failed) == len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
