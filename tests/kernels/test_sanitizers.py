"""The C kernels under AddressSanitizer and UBSan: their own tests run again, on a library built for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ("test_operations.py", "test_native.py", "test_fusion.py", "test_kv_cache.py", "test_rounded_inputs.py",
         "test_products.py", "test_rounding.py", "test_experts.py", "test_delta.py", "test_code_tiles.py",
         "test_int8.py", "test_lora.py", "test_codebooks.py")
# What the interpreter and torch leave behind at the end is not ours.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
RUN = """
import sys
from pathlib import Path
import pytest
from qserve.kernels import native
native.library_path = lambda: Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def _built(folder: Path) -> Path:
    """The library, with the package's own flags and the sanitizers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    library = folder / "kernels.so"
    flags = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-shared", "-fPIC"]
    # What AddressSanitizer finds, too, and a third of the compiler's time: pointers that wrap around.
    flags += ["-fno-sanitize=null,object-size,pointer-overflow"]
    command = ["gcc", *extension["extra-compile-args"], "-O1", *flags, *extension["extra-link-args"]]
    sources = [str(ROOT / source) for source in extension["sources"]]
    subprocess.run([*command, *sources, "-o", str(library), "-lm"], check=True)
    return library


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_kernel_leaves_its_memory_or_its_types(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip("this gcc has no AddressSanitizer")
    library = _built(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library), *(str(ROOT / "tests" / "kernels" / name) for name in TESTS)],
        env={**os.environ, **OPTIONS, "LD_PRELOAD": runtime.stdout.strip()},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
