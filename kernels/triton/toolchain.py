"""What Triton needs of a machine besides a GPU: at the first launch it compiles a small C library, and it keeps what it
compiles in a directory, from where it is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path

from triton import knobs


@lru_cache
def missing() -> str | None:
    """None, or what is missing and what to do about it."""
    return _compiler() or _cache(Path(knobs.cache.dir))


def _compiler() -> str | None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        lacking = "there is no C compiler" if compiler is None else f"CC names {compiler}, which is no program"
        return f"{lacking}: Triton needs gcc or clang and the headers of the C library (Debian: gcc libc6-dev)"
    headers = sysconfig.get_paths("posix_prefix")["include"]
    command = [compiler, "-fsyntax-only", "-x", "c", "-I", headers, "-"]
    done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word why"])[0]
        return f"{compiler} finds no usable Python.h in {headers} (Debian: python3-dev libc6-dev): {said}"
    return None


def _cache(directory: Path) -> str | None:
    advice = "TRITON_CACHE_DIR names a directory that can be written to and run from"
    there = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            return f"{there} is mounted noexec, and Triton keeps its kernels in {directory}: {advice}"
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return f"Triton cannot keep its kernels in {directory} ({error.strerror}): {advice}"
    return None
