"""``qserve bench kernels --device cuda`` in Triton's interpreter, with sizes that prove nothing but that it works:
``python tiny_kernels.py FOLDER [--tune]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from qserve.evals.bench.gpu import tuning
from qserve.evals.bench.gpu.attention import Heads
from qserve.evals.bench.gpu.kernels import Sizes, run
from qserve.evals.report import Report
from qserve.evals.report_files import write_report
from qserve.kernels.triton.tuning.stopwatch import Stopwatch
from qserve.kernels.triton.tuning.tune import Tuner

SIZES = Sizes({"8B qkv": (128, 128)}, (1, 17), {"8B": Heads(2, 1, 16)}, ((2, 20),), ((1, 20),), 1 << 16, 64)
WATCH = Stopwatch(torch.device("cpu"), repeats=1, cold_bytes=1 << 10, least_turns=1)


def main() -> None:
    folder, dtype = Path(sys.argv[1]), torch.float16  # bfloat16 is silently wrong in the interpreter
    report: Report
    if "--tune" in sys.argv:
        report = tuning.run("tiny", folder, Tuner(WATCH), dtype, ("W4A16 g128",), {"8B o": (128, 256)}, most_rows=4)
    else:
        report = run("tiny", WATCH, dtype, SIZES)
        write_report(report, folder / "kernels.json", None, folder / "kernels.html")
    print(report.to_markdown())
    sys.exit(1 if report.data.get("failures") else 0)


if __name__ == "__main__":
    main()
