"""The Arm kernels against the scalar kernels at odd shapes, on an Arm machine or in an emulator."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCALAR, NEON = 0, 3
ON_ARM = platform.machine() == "aarch64"
COMPILER = shutil.which("gcc" if ON_ARM else "aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

pytestmark = pytest.mark.slow


def build(compiler: list[str], options: list[str], out: Path, also: Sequence[str] = (), only: str = "") -> None:
    """The package's own sources, or the one that ends in ``only``, with the package's own flags, and ``also``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    flags = [*extension["extra-compile-args"], "-Wall", "-Werror", "-Wno-unused-function"]
    files = [*(str(ROOT / source) for source in extension["sources"] if source.endswith(only)), *also]
    include = ["-I", str(ROOT / "kernels" / "csrc")]
    subprocess.run([*compiler, *flags, *include, *options, *files, "-o", str(out), "-pthread", "-lm"], check=True)


@pytest.fixture(scope="module")
def compare_isas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What compares two ISAs."""
    if COMPILER is None or (not ON_ARM and EMULATOR is None):
        pytest.skip("there is no compiler for Arm here, or no emulator of it")
    program = tmp_path_factory.mktemp("compare_isas") / "compare_isas"
    build([COMPILER], ["-static"], program, [str(Path(__file__).with_name("compare_isas.c"))])
    return program


def run(program: Path, isa: int, cases: int, cpu: str) -> subprocess.CompletedProcess[str]:
    before = [] if ON_ARM else [str(EMULATOR), "-cpu", cpu]
    return subprocess.run([*before, str(program), str(isa), str(cases)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cpu", ["max", "neoverse-n1"][: 1 if ON_ARM else 2])
def test_the_dot_product_kernels_agree_with_the_scalar_ones(compare_isas: Path, cpu: str) -> None:
    done = run(compare_isas, NEON, 200, cpu)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"best of this machine: {NEON}" in done.stdout


@pytest.mark.skipif(ON_ARM, reason="this machine is what it is")
def test_a_processor_without_the_dot_product_gets_the_scalar_kernels(compare_isas: Path) -> None:
    assert run(compare_isas, NEON, 1, "cortex-a53").returncode == 2
    assert f"best of this machine: {SCALAR}" in run(compare_isas, SCALAR, 1, "cortex-a53").stdout
