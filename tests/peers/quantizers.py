"""The demo model by another quantizer: ``python tests/peers/quantizers.py ENVIRONMENTS MODELS TEXT NAME OUT``.

ENVIRONMENTS come from ``python tests/environments.py peers DIR``; the dense model is made in MODELS where it is not
there. NAME is gptqmodel, auto-round or llm-compressor. Weights of every linear but the tied head, symmetric, in groups
of 64 (of llm-compressor as ``--scheme`` says), calibrated on the very windows that ``qserve quantize demo --calibration
TEXT`` draws: 128 of 512 tokens, or the first ``--samples`` of them. Says how long it took, and writes a checkpoint to
OUT, which ``qserve eval OUT --against demo`` measures. ``--recipe`` is what its authors recommend where time does not
matter. With ``--beside`` it also says how long ``qserve quantize`` takes with these options in the same minutes, before
it and after it.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from make_models import make_dense
from safetensors.torch import save_file

from qserve.calibration.text import load_text
from qserve.calibration.windows import calibration_windows
from qserve.checkpoint.source import open_model

HERE = Path(__file__).absolute().parent / "contestants"
RECIPES = {
    "gptqmodel": ("default", "mse", "gptaq", "mse+gptaq"), "auto-round": ("default", "best"),
    "llm-compressor": ("default", "gptq", "gptq+mse"),
}  # fmt: skip
SCRIPTS = {
    "gptqmodel": "gptqmodel_quantize.py", "auto-round": "auto_round_quantize.py",
    "llm-compressor": "llm_compressor_quantize.py",
}  # fmt: skip
SAMPLES, LENGTH, SEED = 128, 512, 0
"""The defaults of ``qserve quantize``."""
THREADS = "2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("text")
    parser.add_argument("name", choices=SCRIPTS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--scheme", default="NVFP4", help="of llm-compressor: NVFP4, NVFP4A16 or MXFP4A16")
    recipes = "; ".join(f"{name}: {', '.join(known[1:])}" for name, known in RECIPES.items())
    parser.add_argument("--recipe", default="default", help=recipes)
    parser.add_argument("--beside", metavar="OPTIONS", help="of qserve quantize, such as '--effort fast'")
    arguments = parser.parse_args()
    if arguments.recipe not in RECIPES[arguments.name]:
        parser.error(f"--recipe of {arguments.name}: {', '.join(RECIPES[arguments.name])}")
    token_ids = load_text(arguments.text).tokens(open_model("demo").tokenizer())
    # GPTQMODEL_CPU_WORKERS: it does not start with fewer processors than it expects.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": THREADS, "GPTQMODEL_CPU_WORKERS": THREADS}
    with tempfile.TemporaryDirectory() as work:
        windows = Path(work) / "windows.safetensors"
        save_file({"windows": calibration_windows(token_ids, SAMPLES, LENGTH, SEED)[: arguments.samples]}, str(windows))
        python = arguments.environments.absolute() / arguments.name / "bin" / "python"
        model, out = make_dense(arguments.models).absolute(), arguments.out.absolute()
        kind = arguments.scheme if arguments.name == "llm-compressor" else str(arguments.bits)
        options = [model, windows, out, kind, arguments.recipe]
        ours: list[float] = []
        if arguments.beside is not None:
            command = [sys.executable, "-m", "qserve", "quantize", "demo", Path(work) / "ours", "--overwrite"]
            command += ["--calibration", arguments.text, "--bits", str(arguments.bits), *shlex.split(arguments.beside)]
            ours = [seconds_of(command), seconds_of(command)]
        seconds = seconds_of([python, HERE / SCRIPTS[arguments.name], *options], environment, work)  # where it logs
        if ours:
            ours += [seconds_of(command), seconds_of(command)]
    print(f"{arguments.name}: {seconds:.0f} s from start to end")
    if ours:
        taken = statistics.median(ours)
        each = ", ".join(f"{each:.0f}" for each in ours)
        print(f"qserve quantize {arguments.beside}: {each} s, {seconds / taken:.1f} times as fast")
    else:
        print(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.1f} GiB at most")


def seconds_of(
    command: Sequence[str | Path], environment: dict[str, str] | None = None, cwd: str | None = None
) -> float:
    """From start to end of a process."""
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, cwd=cwd)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
