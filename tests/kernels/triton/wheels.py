"""Wheels of what a GPU machine without a network lacks, as a folder: ``python tests/kernels/triton/wheels.py DIR``.

The machine has Python 3.12 on x86-64 and what an image for PyTorch has: ``PRESENT``, or the names that ``--present``
reads, one at the start of each line, as ``pip list`` prints them there. Everything else that qserve and its GPU tests
ask for is downloaded, and what that asks for in turn; with ``--peers`` also what the products are compared with, the
ones without a wheel built here where they are plain Python. Exits with 1 where a requirement has no wheel, or the
folder is larger than ``--most`` MiB. ``gpu_session.py OUT --wheels DIR`` installs it, without a compiler.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[3]
PYTHON = (3, 12)
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)), "manylinux2014_x86_64", "linux_x86_64"]
ENVIRONMENT = {
    "python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "platform_system": "Linux",
    "platform_machine": "x86_64", "os_name": "posix", "implementation_name": "cpython", "extra": "",
    "platform_python_implementation": "CPython",
}  # fmt: skip
"""For which the conditions of requirements are read."""
PRESENT = """
    accelerate aiofiles aiohttp annotated-doc anyio attrs certifi charset-normalizer click cmake cuda-bindings
    cuda-core cuda-pathfinder cupy-cuda13x einops execnet filelock fsspec h11 hf-xet httpcore httpx huggingface-hub
    hypothesis idna iniconfig jinja2 joblib markdown-it-py markupsafe matplotlib mdurl ml-dtypes mpmath
    multipledispatch networkx ninja numpy nvidia-ml-py packaging pandas pillow pip pluggy prometheus-client
    protobuf psutil pyarrow pygments pytest pytest-timeout pytest-xdist python-dateutil pyyaml regex requests rich
    safetensors scipy sentencepiece setuptools shellingham six sortedcontainers sympy tabulate tiktoken tokenizers
    torch tqdm transformers triton typer typing-extensions urllib3 wheel xxhash
"""
"""Of an image with CUDA, PyTorch and transformers."""
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "openai>=2", "setuptools>=77")
NOT_NEEDED = frozenset({"datasets"})
"""It is imported where a text is fetched from a hub."""
PEERS = ("gemlite", "humming-kernels")
"""FlashInfer and what it asks for have 170 MiB, vLLM more."""
MOST = 60.0
"""MiB."""


def tags() -> set[Tag]:
    """Of the wheels that the machine installs."""
    return {*cpython_tags(PYTHON, platforms=PLATFORMS), *compatible_tags(PYTHON, "cp312", PLATFORMS)}


def wanted(peers: bool) -> list[Requirement]:
    """Of qserve, of its GPU tests, and of its peers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(each) for each in (*project["dependencies"], *TOOLS, *(PEERS if peers else ()))]
    here = [each for each in asked if each.marker is None or each.marker.evaluate(ENVIRONMENT)]
    return [each for each in here if canonicalize_name(each.name) not in NOT_NEEDED]


def needs(wheel: Path, extras: set[str]) -> list[Requirement]:
    """What a wheel asks for on the machine, with these extras of it."""
    with zipfile.ZipFile(wheel) as held:
        name = next(each for each in held.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        found = Parser().parsestr(held.read(name).decode())
    return [
        need for need in map(Requirement, found.get_all("Requires-Dist", []))
        if need.marker is None or any(need.marker.evaluate({**ENVIRONMENT, "extra": each}) for each in {"", *extras})
    ]  # fmt: skip


def download(need: Requirement, folder: Path) -> Path:
    """Its wheel in ``folder``: fetched, or, of plain Python without one, built. Raises ``CalledProcessError``."""
    pip = [sys.executable, "-m", "pip"]
    before = set(folder.iterdir())
    asked = f"{need.name}{need.specifier}"
    machine = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    fetch = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
             "--implementation", "cp", *machine, "--dest", str(folder), asked]  # fmt: skip
    if subprocess.run(fetch, capture_output=True).returncode:
        subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), asked], check=True)
    return next(iter(set(folder.iterdir()) - before))


def collect(folder: Path, present: frozenset[str], asked: list[Requirement]) -> list[str]:
    """Fill ``folder``, which is empty; what is wrong with it."""
    faults: list[str] = []
    known, allowed = set(present), tags()
    left = list(asked)
    while left:
        need = left.pop()
        name = canonicalize_name(need.name)
        if name in known:
            continue
        known.add(name)
        try:
            wheel = download(need, folder)
        except subprocess.CalledProcessError:
            faults.append(f"{need}: there is no wheel")
            continue
        if not parse_wheel_filename(wheel.name)[3] & allowed:
            faults.append(f"{wheel.name} is for another machine")
        left += needs(wheel, need.extras)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="made anew; it must not hold anything")
    parser.add_argument("--present", type=Path, help="what is there already")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--most", type=float, default=MOST, help=f"MiB that may travel, {MOST:.0f} by default")
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    if any(asked.directory.iterdir()):
        parser.error(f"{asked.directory} is not empty")
    present = frozenset(PRESENT.split())
    if asked.present:
        lines = asked.present.read_text().splitlines()
        present = frozenset(canonicalize_name(re.split(r"[\s=,;]", line.strip())[0]) for line in lines if line.strip())
    faults = collect(asked.directory, present, wanted(asked.peers))
    sizes = {each.name: each.stat().st_size / 2**20 for each in sorted(asked.directory.iterdir())}
    print("\n".join(f"{size:7.2f} MiB  {name}" for name, size in sizes.items()))
    print(f"{sum(sizes.values()):7.2f} MiB in {len(sizes)} wheels")
    if sum(sizes.values()) > asked.most:
        faults.append(f"the wheels have {sum(sizes.values()):.1f} MiB: at most {asked.most:.0f} may travel")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
