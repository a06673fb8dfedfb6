"""Everything that needs a GPU, in one go and under ten minutes: ``python tests/kernels/triton/gpu_session.py OUT``.

The tests marked ``gpu``, ``qserve bench kernels --device cuda``, the engine end to end, and the whole-model benchmark;
logs and reports go to the folder OUT. Exits with 1 where a part failed; the others run all the same. ``--tiny`` is for
a machine without a GPU: the same parts in Triton's interpreter, with sizes that prove nothing but that this works.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LIMIT = 540
"""Seconds of all parts together."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tests", default=str(HERE), help="what pytest collects")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    tiny = ["--tiny"] if asked.tiny else []
    reports = ["--json", str(asked.out / "kernels.json"), "--html", str(asked.out / "kernels.html")]
    bench = ["-c", "from qserve.cli import main; main()", "bench", "kernels", "--device", "cuda", *reports]
    parts = {
        "tests": ["-m", "pytest", asked.tests, "-m", "gpu", "-q", "-p", "no:cacheprovider"],
        "kernels": [str(HERE / "tiny_kernels.py"), str(asked.out)] if asked.tiny else bench,
        "end-to-end": [str(HERE / "end_to_end.py"), str(asked.out / "end-to-end.json"), *tiny],
        "whole-model": [str(HERE / "whole_model.py"), str(asked.out / "whole-model.json"), *tiny],
    }
    begin, failed = time.monotonic(), []
    for name, command in parts.items():
        log = asked.out / f"{name}.log"
        with log.open("w") as stream:
            try:
                left = max(1.0, LIMIT - (time.monotonic() - begin))
                code = subprocess.run(
                    [sys.executable, *command], cwd=HERE.parents[2], stdout=stream, stderr=stream, timeout=left
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
        print(f"{name}: {'passed' if code == 0 else f'failed with {code}'} after {time.monotonic() - begin:.0f} s")
        print("\n".join(log.read_text().splitlines()[-40:]), flush=True)
        failed += [name] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
