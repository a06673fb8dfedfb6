"""qserve beside its peers: ``python tests/peers/contest.py ENVIRONMENTS MODELS CHECKPOINT [--isa avx2]``.

ENVIRONMENTS come from ``python tests/environments.py peers DIR``, MODELS from ``make_models.py``, CHECKPOINT from
``qserve quantize demo``. Every contestant runs in a process of its own and rests while the others have their turn: the
cases are run one round after the other, each contestant once a round in changing order, and medians are compared. What
the machine does at most is measured in every round, too.

``--isa avx2`` keeps those from AVX-512 that can be kept: qserve takes its kernels for AVX2, llama.cpp is built for it,
torch obeys a variable. OpenVINO ends with an error where oneDNN is limited below what it sees: it uses what the machine
has. ``--one-thread`` compares the processor seconds of one thread: on a busy machine a clock says little. MODELS and
CHECKPOINT may be of ``make_random.py``, or a folder with any GGUF file and what ``qserve quantize`` makes of it:
llama.cpp runs every ``*.gguf`` there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qserve.kernels import peaks

HERE = Path(__file__).parent / "contestants"
THREADS = "2"
KERNELS = {None: "native", "avx2": "native-avx2", "avxvnni": "native-avxvnni"}
AVX2_ALONE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
WARM_UP = (2, 64, 8)
"""Requests, prompt and output of what is not counted."""
REST = 0.5
"""Seconds before each turn: threads of whoever had the one before may still spin."""


@dataclass(frozen=True)
class Case:
    """``requests`` at once, each of ``prompt`` and ``output`` tokens; the rate counts ``counted`` tokens of each."""

    name: str
    requests: int
    prompt: int
    output: int
    counted: int


FIRST = Case("first token", 1, 64, 1, 64)
CASES = (
    FIRST,
    Case("decode, one request", 1, 64, 64, 63),
    Case("prefill of 512", 1, 512, 1, 512),
    Case("8 requests, output", 8, 64, 64, 64),
    Case("32 requests, output", 32, 64, 64, 64),
    Case("64 requests, output", 64, 64, 64, 64),
)


@dataclass
class Contestant:
    """A process that takes turns. ``seconds``: of each case, by round, on the ``clock`` of its answers."""

    name: str
    command: list[str]
    variables: dict[str, str]
    clock: str = "seconds"
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **self.variables},
        )  # fmt: skip
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}: run {' '.join(self.command)} to see why")
        return dict(json.loads(line))

    def stop(self) -> None:
        if hasattr(self, "process"):
            self.process.kill()
            self.process.wait()

    def turn(self, requests: int, prompt: int, output: int, seed: int) -> float:
        assert self.process.stdin is not None
        time.sleep(REST)
        print(json.dumps([requests, prompt, output, seed]), file=self.process.stdin, flush=True)
        return self._answer()[self.clock]

    def rate(self, case: Case) -> float:
        """Tokens per second, from the median; decoding is what follows the first token."""
        seconds = statistics.median(self.seconds[case.name])
        if case.counted < case.output:
            seconds -= statistics.median(self.seconds[FIRST.name])
        return case.requests * case.counted / seconds


def contestants(
    environments: Path, models: Path, checkpoint: str, isa: str | None, threads: str
) -> list[Contestant]:
    """Ours first."""

    def entry(name: str, python: str, script: str, *arguments: str) -> Contestant:
        return Contestant(name, [python, str(HERE / script), *arguments], AVX2_ALONE if isa else {})

    openvino = str(environments / "openvino" / "bin" / "python")
    llama = str(environments / ("llama-cpp-avx2" if isa else "llama-cpp") / "bin" / "python")
    dense, floats = str(models / "dense"), "float32" if isa else "bfloat16"
    return [
        entry("qserve", sys.executable, "qserve_engine.py", checkpoint, threads, KERNELS[isa]),
        entry("OpenVINO int4", openvino, "openvino_batching.py", str(models / "openvino-int4"), threads),
        entry("OpenVINO int8", openvino, "openvino_batching.py", str(models / "openvino-int8"), threads),
        *(entry(f"llama.cpp {file.stem}", llama, "llama_cpp_batch.py", str(file), threads)
          for file in sorted(models.glob("*.gguf"))),
        entry(f"transformers {floats}", sys.executable, "transformers_generate.py", dense, threads, floats),
    ]


def table(field_: list[Contestant], cases: Sequence[Case]) -> str:
    """Markdown: rates by case, and ours over the best of the others."""
    ours, peers = field_[0], field_[1:]
    lines = ["| tokens/s | " + " | ".join(c.name for c in field_) + " | over the best peer |"]
    lines.append("|---" * (len(field_) + 2) + "|")
    for case in cases[1:]:
        best = max(peer.rate(case) for peer in peers)
        rates = " | ".join(f"{c.rate(case):.0f}" for c in field_)
        lines.append(f"| {case.name} | {rates} | {ours.rate(case) / best:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--isa", choices=[isa for isa in KERNELS if isa])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], help="contestants whose names begin so stay out")
    parser.add_argument("--one-request", action="store_true", help="without the cases of many requests")
    parser.add_argument("--one-thread", action="store_true", help="processor seconds of one thread each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threads, clock = ("1", "processor") if options.one_thread else (THREADS, "seconds")
    cases = [case for case in CASES if case.requests == 1 or not options.one_request]
    everyone = contestants(options.environments, options.models, options.checkpoint, options.isa, threads)
    running = [replace(each, clock=clock) for each in everyone if not each.name.startswith(tuple(options.without))]
    try:
        for contestant in running:
            contestant.start()
            contestant.turn(*WARM_UP, seed=0)
        machine = []
        for turn in range(options.rounds):
            machine.append(peaks.measure(int(threads), options.isa))
            for case in cases:
                first = turn % len(running)
                for contestant in running[first:] + running[:first]:
                    seconds = contestant.turn(case.requests, case.prompt, case.output, seed=turn + 1)
                    contestant.seconds.setdefault(case.name, []).append(seconds)
                    print(f"{turn + 1}: {case.name}: {contestant.name}: {seconds:.3f} s", file=sys.stderr, flush=True)
    finally:
        for contestant in running:
            contestant.stop()
    if not options.one_thread:  # else the machine is busy, and these are measured by the clock
        measured = zip(*((p.products or 0.0, p.bytes) for p in machine))
        products, read = (statistics.median(figures) for figures in measured)
        print(f"At most {products / 1e9:.0f} GMAC/s of bytes in registers and {read / 1e9:.1f} GB/s from memory.\n")
    print(table(running, cases))
    if options.json:
        options.json.write_text(json.dumps({c.name: c.seconds for c in running}, indent=2))


if __name__ == "__main__":
    main()
