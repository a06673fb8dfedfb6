"""``python .ci/check_wheel.py WHEEL...``: each wheel holds the C kernels of every instruction set of its processor.

An install without a compiler goes on without them, and so does the building of a wheel: this is where it would show.
Each wheel is for the processor that runs this.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import zipfile
from pathlib import Path

KERNELS = {"x86_64": ("scalar", "avx2", "vex", "evex", "avx512", "amx"), "aarch64": ("scalar", "neon")}


def fault(wheel: Path) -> str | None:
    """What is wrong with a wheel, or None."""
    processor = next((name for name in KERNELS if wheel.stem.endswith(name)), None)
    if processor is None:
        return f"is for none of {', '.join(KERNELS)}"
    with zipfile.ZipFile(wheel) as content, tempfile.TemporaryDirectory() as directory:
        libraries = [name for name in content.namelist() if name.startswith("qserve/kernels/_native.")]
        if len(libraries) != 1:
            return "holds no library of C kernels: it was built without a compiler"
        library = ctypes.CDLL(content.extract(libraries[0], directory))
        missing = [name for name in KERNELS[processor] if not hasattr(library, f"qs_kernels_{name}")]
    return f"lacks kernels for {', '.join(missing)}" if missing else None


def main() -> int:
    wheels = [Path(name) for name in sys.argv[1:]]
    faults = {wheel.name: fault(wheel) for wheel in wheels}
    for name, found in faults.items():
        print(f"{name}: {found or 'every instruction set is there'}")
    return int(not wheels or any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
