"""The environments of the judges: ``python tests/interop/environments.py DIR [NAME...]`` makes them in DIR.

Each is a virtual environment of its own, since the tools exclude each other (and some exclude a transformers of
this decade); ``DIR/NAME/bin/python`` runs a judge in it. An environment that is complete is left alone. Set
``QSERVE_INTEROP=DIR`` to run the tests with them: ``pytest -m interop``.
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
    """``packages`` are installed as usual, then ``alone`` without what they ask for: their own pins are years old,
    and they need nothing of it here. ``imports`` must succeed at the end."""

    packages: tuple[str, ...]
    alone: tuple[str, ...]
    imports: tuple[str, ...]


TORCH = "torch>=2.11,<2.14"
ENVIRONMENTS = {
    # The last releases of two archived projects: neither knows a transformers after 4.51.
    "archived": Environment(
        packages=(
            TORCH, "setuptools<81", "wheel", "numpy<2.4", "transformers==4.51.3", "peft==0.17.1", "accelerate==1.7.0",
            "datasets==3.6.0", "sentencepiece", "gekko", "rouge", "zstandard", "tabulate",
        ),
        alone=("auto-gptq==0.7.1", "autoawq==0.2.9"),
        imports=("auto_gptq", "awq"),
    ),
    "compressed-tensors": Environment(
        packages=(TORCH, "transformers==5.23.0", "accelerate", "compressed-tensors==0.20.0"),
        alone=(),
        imports=("compressed_tensors", "transformers"),
    ),
}
COMPLETE = "complete.json"


def make(directory: Path, name: str) -> None:
    """Make ``directory / name`` unless it is there already, made from the same pins."""
    environment, home = ENVIRONMENTS[name], directory / name
    pins = json.dumps([environment.packages, environment.alone])
    if (home / COMPLETE).exists() and (home / COMPLETE).read_text(encoding="utf-8") == pins:
        print(f"{name}: complete already")
        return
    print(f"{name}: making {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    _pip(home, *environment.packages)
    if environment.alone:
        # Not isolated: their build scripts import torch. Their CUDA extensions are not what is judged.
        _pip(home, "--no-deps", "--no-build-isolation", *environment.alone, BUILD_CUDA_EXT="0")
    subprocess.run([home / "bin" / "python", "-c", f"import {', '.join(environment.imports)}"], check=True)
    (home / COMPLETE).write_text(pins, encoding="utf-8")


def _pip(home: Path, *arguments: str, **variables: str) -> None:
    command = [home / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of {', '.join(ENVIRONMENTS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(ENVIRONMENTS):
        parser.error(f"unknown environment {', '.join(sorted(unknown))}; known: {', '.join(ENVIRONMENTS)}")
    failed = []
    for name in arguments.names or ENVIRONMENTS:
        try:
            make(arguments.directory.resolve(), name)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: failed ({error})", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
