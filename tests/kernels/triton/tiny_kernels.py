"""``qserve bench kernels --device cuda`` in Triton's interpreter, with sizes that prove nothing but that it works:
``python tiny_kernels.py FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from qserve.evals.bench.gpu.attention import Heads
from qserve.evals.bench.gpu.kernels import Sizes, run
from qserve.kernels.triton.stopwatch import Stopwatch

SIZES = Sizes({"8B qkv": (128, 128)}, (1, 17), {"8B": Heads(2, 1, 16)}, ((2, 20),), copied=1 << 16, side=64)


def main() -> None:
    folder = Path(sys.argv[1])
    watch = Stopwatch(torch.device("cpu"), repeats=1, cold_bytes=1 << 10, least_turns=1)
    report = run("tiny_kernels.py", watch, torch.float16, SIZES)  # bfloat16 is silently wrong in the interpreter
    report.write(folder / "kernels.json", None, folder / "kernels.html")
    print(report.to_markdown())
    sys.exit(1 if report.data["failures"] else 0)


if __name__ == "__main__":
    main()
