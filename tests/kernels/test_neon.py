"""The Arm kernels, on a machine that has them or in an emulator of one: beside their scalar twin, at odd shapes."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCALAR, NEON = 0, 3
ON_ARM = platform.machine() == "aarch64"
COMPILER = shutil.which("gcc" if ON_ARM else "aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no compiler for Arm here"),
    pytest.mark.skipif(not ON_ARM and EMULATOR is None, reason="there is no emulator of Arm here"),
]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's own sources with the package's own flags, and what compares two ISAs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    program = tmp_path_factory.mktemp("twins") / "twins"
    sources = [str(ROOT / source) for source in extension["sources"]] + [str(Path(__file__).with_name("twins.c"))]
    command = [str(COMPILER), *extension["extra-compile-args"], "-Wall", "-Werror", "-Wno-unused-function", "-static"]
    include = ["-I", str(ROOT / "kernels" / "csrc")]
    subprocess.run([*command, *include, *sources, "-o", str(program), "-pthread", "-lm"], check=True)
    return program


def run(program: Path, isa: int, cases: int, cpu: str) -> subprocess.CompletedProcess[str]:
    before = [] if ON_ARM else [str(EMULATOR), "-cpu", cpu]
    return subprocess.run([*before, str(program), str(isa), str(cases)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cpu", ["max", "neoverse-n1"][: 1 if ON_ARM else 2])
def test_the_dot_product_kernels_agree_with_their_twin(twins: Path, cpu: str) -> None:
    done = run(twins, NEON, 200, cpu)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"best of this machine: {NEON}" in done.stdout


@pytest.mark.skipif(ON_ARM, reason="this machine is what it is")
def test_a_processor_without_the_dot_product_gets_the_scalar_kernels(twins: Path) -> None:
    assert run(twins, NEON, 1, "cortex-a53").returncode == 2
    assert f"best of this machine: {SCALAR}" in run(twins, SCALAR, 1, "cortex-a53").stdout
