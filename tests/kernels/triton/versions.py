"""Every Triton that is allowed compiles the kernels: ``python -m tests.kernels.triton.versions DIR [VERSION...]``.

One configuration of every kernel for each architecture, by the oldest and the newest Triton of PyPI, or by the named
versions (``3.7.1``, ``3.8.*``). Each is installed alone into a folder of DIR and put before the Triton that is here;
what is there already is left alone, and the newest is passed by where it is the one that is here, which pytest tests.
What each compiles for sm_90 runs some tests in the emulator. Exits with 1 where a kernel does not compile, spills
(those of float32 may), or needs more shared memory than its architecture has, or a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from qserve.kernels.triton.target import described
from tests.kernels.triton.aot import Compiled, compile_file, may_spill, parked
from tests.kernels.triton.test_emulated import FEW, emulate

HERE = Path(__file__).parent
FILES = ("linear_cases.py", "engine_cases.py", "latent_cases.py")
RUN = ("test_gpu_linear.py", "test_gpu_engine.py")
OLDEST, NEWEST = "3.6.*", "newest"


def install(version: str, home: Path) -> Path:
    """The folder that holds this Triton, and nothing that it asks for."""
    folder = home / version.replace("*", "x")
    if not list(folder.glob("triton-*.dist-info")):
        wanted = "triton>=3.6" if version == NEWEST else f"triton=={version}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), wanted]
        subprocess.run(pip, check=True)
    return folder


def faults(made: dict[str, Compiled]) -> list[str]:
    found = []
    for name, kernel in made.items():
        architecture = re.findall(r"sm_\d+", name)[0]
        if parked(kernel) and not may_spill(name):
            found.append(f"{name}: {kernel.spills} bytes of spills")
        if kernel.shared_bytes > described(architecture).shared_bytes:
            found.append(f"{name}: {kernel.shared_bytes} bytes of shared memory")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=[OLDEST, NEWEST])
    asked = parser.parse_args()
    failed = False
    for version in asked.versions:
        folder = install(version, asked.directory.resolve())
        os.environ["PYTHONPATH"] = str(folder)
        os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
        number = next(folder.glob("triton-*.dist-info")).name.split("-")[1].removesuffix(".dist")
        if version == NEWEST and number == metadata.version("triton"):
            print(f"Triton {number}: the newest is the one that is here", flush=True)
            continue
        found = []
        for file in FILES:
            try:
                made = compile_file(HERE / file, timeout=1700)
            except RuntimeError as error:
                found.append(str(error))
            else:
                found += faults(made)
                print(f"Triton {number}: {len(made)} kernels of {file} compile", flush=True)
        try:
            passed = emulate(90, *RUN, "-k", FEW, timeout=1700, one_in=2)
        except AssertionError as error:
            found.append(str(error))
        else:
            print(f"Triton {number}: {passed} tests of what it compiles pass", flush=True)
        print("\n".join([f"Triton {number}: {line}" for line in found]), end="\n" if found else "")
        failed |= bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
