"""Split products, attention and GPTQ's kernel in compute-sanitizer: ``python sanitize.py [--tiny]``.

Looks for accesses outside of memory (memcheck) and for races in shared memory (racecheck) in the kernels where programs
or threads wait for one another. Passes where the machine has no compute-sanitizer, and says so. ``--tiny`` only
collects the tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = {
    "test_gpu_linear.py": "split",
    "test_gpu_engine.py": "attend and 300 and 8-2-128",
    "test_sweep.py": "cuda and (scheme0 or scheme5)",
}
"""The file, and which of its tests."""


def main() -> int:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None and "--tiny" not in sys.argv:
        print("no compute-sanitizer here: nothing was looked for")
        return 0
    failed = 0
    for tool in ("memcheck", "racecheck"):
        for file, wanted in TESTS.items():
            command = [sys.executable, "-m", "pytest", str(HERE / file), "-m", "gpu", "-k", wanted, "-q",
                       "-p", "no:xdist", "-p", "no:cacheprovider",
                       "-o", "addopts=--import-mode=importlib", "--timeout", "0"]  # fmt: skip
            if "--tiny" in sys.argv or sanitizer is None:
                command.append("--collect-only")
            else:
                command = [sanitizer, "--tool", tool, "--error-exitcode", "3", "--print-limit", "20", *command]
            print(f"{tool}: {file}, {wanted}", flush=True)
            failed |= subprocess.run(command).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
