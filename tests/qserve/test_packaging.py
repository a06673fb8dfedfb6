"""The wheel: its content, that it works where it is installed, and an install without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("checkpoint", "kernels", "runtime", "calibration", "quantize", "evals")

USE = """
import sys, qserve
from qserve.kernels import registry
print(qserve.__file__)
print(registry.make().name)
best = next(each for each in registry.executors() if each.name == "native")
print(best.name, "|", best.reason, "|", best.cost)
params = qserve.SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
outputs = qserve.LLM(sys.argv[1]).generate(["the quick brown"], params)
print(len(outputs[0].outputs[0].token_ids))
"""


def copy_of_the_sources(directory: Path) -> Path:
    """The sources as a fresh clone has them."""
    sources = directory / "sources"
    for folder in ("qserve", "tests", *LAYERS):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, sources / folder, symlinks=True, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, sources)
    return sources


def wheel_of(directory: Path, **environment: str) -> Path:
    sources = copy_of_the_sources(directory)
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(directory), str(sources)]
    done = subprocess.run(
        [sys.executable, "-m", *build], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two, built at the same time: with the compiler of this machine, in a hurry, and with one that fails."""
    hasty = tmp_path_factory.mktemp("compiler") / "cc"
    hasty.write_text(f'#!/bin/sh\nexec {shutil.which("cc") or "gcc"} "$@" -O0\n', encoding="utf-8")
    hasty.chmod(0o755)
    with ThreadPoolExecutor() as pool:
        compiled = pool.submit(wheel_of, tmp_path_factory.mktemp("compiled"), CC=str(hasty))
        plain = pool.submit(wheel_of, tmp_path_factory.mktemp("plain"), CC="/bin/false")
        return compiled.result(), plain.result()


def use(wheel: Path, directory: Path, model: Path) -> list[str]:
    """Install the wheel into a folder of its own, use it from elsewhere, and return what it printed."""
    target, elsewhere = directory / "site", directory / "elsewhere"
    elsewhere.mkdir()
    install = ["pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", USE, str(model)],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert Path(lines[0]) == target / "qserve" / "__init__.py"
    return lines[1:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler")
def test_the_wheel_holds_the_package_and_works(wheels: tuple[Path, Path], tmp_path: Path, tiny_packed: Path) -> None:
    wheel = wheels[0]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"qserve"}
    assert "qserve/py.typed" in names
    assert [name for name in names if name.startswith("qserve/kernels/_native") and name.endswith(".so")]
    assert not [name for name in names if "test" in name]
    page = {f"qserve/runtime/server/static/{path.name}" for path in (ROOT / "runtime/server/static").iterdir()}
    assert page and page <= names
    data = {f"qserve/evals/planner/data/{path.name}" for path in (ROOT / "evals/planner/data").iterdir()}
    assert data and data <= names
    expected = {f"qserve/{path.relative_to(ROOT / 'qserve')}" for path in (ROOT / "qserve").rglob("*.py")}
    expected |= {f"qserve/{path.relative_to(ROOT)}" for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    selected, best, generated = use(wheel, tmp_path, tiny_packed)
    assert selected == "native" and best.startswith("native | None") and generated == "5"


@pytest.mark.slow
def test_an_install_without_a_compiler_serves_and_says_what_it_lacks(
    wheels: tuple[Path, Path], tmp_path: Path, tiny_packed: Path
) -> None:
    wheel = wheels[1]
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    selected, best, generated = use(wheel, tmp_path, tiny_packed)
    assert selected == "reference" and generated == "5"
    name, reason, cost = best.split(" | ")
    assert name == "native" and "built" in reason and "slower" in cost


def test_the_archive_of_sources_holds_all_that_a_wheel_is_built_of(tmp_path: Path) -> None:
    sources = copy_of_the_sources(tmp_path)
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    modules = {f"qserve/{path.relative_to(ROOT)}" for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert modules <= names
    csrc = {f"kernels/csrc/{path.name}" for path in (ROOT / "kernels/csrc").iterdir()}
    assert csrc <= names


def test_a_copy_that_lost_its_links_says_so(tmp_path: Path) -> None:
    # What a zip and a git without links make of a link: a small file that holds where it pointed.
    (tmp_path / "qserve").mkdir()
    shutil.copy(ROOT / "qserve" / "__init__.py", tmp_path / "qserve")
    for layer in LAYERS:
        (tmp_path / "qserve" / layer).write_text(os.readlink(ROOT / "qserve" / layer), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", "import qserve"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "lost its symbolic links" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_release_takes_no_wheel_without_kernels(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    # As they are named after auditwheel has seen them.
    named = [Path(shutil.copy(wheel, tmp_path / f"{n}_{wheel.name}")) for n, wheel in enumerate(wheels)]
    command = [sys.executable, str(ROOT / ".ci/check_wheel.py")]
    good, bad = (subprocess.run([*command, str(path)], capture_output=True, text=True) for path in named)
    assert good.returncode == 0 and "every instruction set is there" in good.stdout
    assert bad.returncode == 1 and "built without a compiler" in bad.stdout
