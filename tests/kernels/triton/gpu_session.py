"""Everything that needs a GPU, in one go and under ten minutes: ``python tests/kernels/triton/gpu_session.py OUT``.

Nothing must be installed: the source tree is put on Python's path, and with ``--wheels DIR`` the packages that
``wheels.py`` made a folder of, which takes neither a network nor a compiler. Triton needs a C compiler and Python's
headers; where one is missing the program says so and ends with 2 before it begins.

In this order: the tests marked ``gpu``, each once before any with its second parameters, in several processes at a
time. What one test breaks on a GPU is broken for its whole process, so another takes its place. None begins when their
time is over, and every result is a line of the log when it is known. Then split products and attention in
compute-sanitizer; the best configurations of the products, written where the package looks for them, so that all that
follows goes by them; ``qserve bench kernels --device cuda``; the engine end to end; and the whole models. A part has
its share of the time that is left and ends when it is over, whatever the others did; what it had found by then is in
OUT: ``session.log``, ``session.json``, the reports, and the configurations. Exits with 1 where a part failed.

``--parts tests,tune`` runs some: with three calls every part has more time (``tests,sanitize``; ``tune,kernels``;
``end-to-end,whole-model``), the later ones by the configurations of the second, for they are a file of the source tree,
which OUT has a copy of. ``--tiny`` is for a machine without a GPU: the same parts in Triton's interpreter, with sizes
that prove nothing but that this works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DATA = ROOT / "kernels/triton/tuning/data"
LIMIT = 500.0
"""Seconds of all parts together."""
SPARE = 15.0
"""Seconds that a part needs to end by itself, so that it is told to begin nothing new so much earlier."""
TESTS = (HERE, ROOT / "tests/quantize/test_device.py", ROOT / "tests/runtime/server/telemetry/test_gpu.py")
"""Where there are tests marked ``gpu``: to collect all takes every process half a minute."""
SHARES = {"tests": 5.0, "sanitize": 2.0, "tune": 4.0, "kernels": 4.0, "end-to-end": 2.0, "whole-model": 5.0}
"""Of the time, in the order in which they run."""
WORKERS = max(1, min(12, (os.cpu_count() or 1) - 2))
"""Processes of tests. Compiling and the references take most of their time, and the GPU has memory for all."""
CLI = ["-c", "from qserve.cli import main; main()"]
MACHINE = """
import json, platform, torch, transformers, triton
from qserve.kernels.triton import toolchain
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
                  "transformers": transformers.__version__, "cuda": torch.version.cuda,
                  "lacking": toolchain.missing(), "gpu": gpu and gpu.name,
                  "multiprocessors": gpu and gpu.multi_processor_count}))
"""


def commands(out: Path, tests: list[str], tiny: bool, seconds: dict[str, float]) -> dict[str, list[str]]:
    """What is run, in order; with so many ``seconds`` for each."""
    limit = {name: f"{max(1.0, each - SPARE):.0f}" for name, each in seconds.items()}
    small = ["--tiny"] if tiny else []
    gpu = [*CLI, "bench", "kernels", "--device", "cuda"]
    return {
        "tests": ["-m", "pytest", *tests, "-m", "gpu", "-v", "-rfEs", "--tb", "short", "--durations", "10",
                  "-p", "no:cacheprovider", "-p", "tests.kernels.triton.deadline", "--seconds", limit["tests"],
                  "-n", f"{WORKERS}", "--dist", "load", "--maxschedchunk", "1",
                  "-o", "addopts=--import-mode=importlib", "--timeout", "120", "--timeout-method", "thread"],
        "sanitize": [str(HERE / "sanitize.py"), *small],
        "tune": [str(HERE / "tiny_kernels.py"), str(out), "--tune"] if tiny
        else [*gpu, "--tune", str(DATA), "--limit", limit["tune"]],
        "kernels": [str(HERE / "tiny_kernels.py"), str(out)] if tiny
        else [*gpu, "--limit", limit["kernels"], "--json", str(out / "kernels.json"), "--html",
              str(out / "kernels.html")],
        "end-to-end": [str(HERE / "end_to_end.py"), str(out / "end-to-end.json"), *small],
        "whole-model": [str(HERE / "whole_model.py"), str(out / "whole-model.json"), "--limit", limit["whole-model"],
                        *small],
    }  # fmt: skip


def prepare(site: Path, wheels: Path | None) -> str:
    """Fill ``site`` with the package and what ``wheels`` holds; the PYTHONPATH of every part. Raises
    ``CalledProcessError``."""
    if wheels is not None:
        found = sorted(map(str, wheels.glob("*.whl")))
        install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        subprocess.run([sys.executable, *install, *found], check=True)
    # Links, and not the tree itself, where ``kernels`` and ``evals`` would hide packages of these names.
    for name in ("qserve", "tests"):
        (site / name).symlink_to(ROOT / name)
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = about["name"], about["version"]
    known = site / f"{name.replace('-', '_')}-{version}.dist-info"  # reports say which version made them
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(command: list[str], log: Path, seconds: float) -> int:
    """The exit code; 124 where it took longer and was ended, with whatever it had started."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            return process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    with tempfile.TemporaryDirectory() as site:
        return session(Path(site))


def session(site: Path) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default=",".join(SHARES), help="some of " + ", ".join(SHARES))
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of all, {LIMIT:.0f} by default")
    parser.add_argument("--tests", nargs="+", default=list(map(str, TESTS)), help="what pytest collects")
    parser.add_argument("--wheels", type=Path, help="what is installed first, into a folder that is gone afterwards")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    wanted = asked.parts.split(",")
    if unknown := set(wanted) - SHARES.keys():
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: choose from {', '.join(SHARES)}")
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not asked.tiny:
        DATA.mkdir(exist_ok=True)
    log, begin, parts = out / "session.log", time.monotonic(), {}
    os.environ["PYTHONPATH"] = prepare(site, asked.wheels)
    machine = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, cwd=site)
    print(machine.stdout + machine.stderr[-2000:], flush=True)
    if machine.returncode:
        missing = "torch, triton, transformers or the package cannot be imported"
    elif not asked.tiny and json.loads(machine.stdout)["gpu"] is None:
        missing = "torch sees no GPU"
    else:
        missing = json.loads(machine.stdout).get("lacking")
    if missing is not None:
        print(missing)
        return 2
    names = [name for name in SHARES if name in wanted]
    for index, name in enumerate(names):
        left = asked.limit - (time.monotonic() - begin)
        share = left * SHARES[name] / sum(SHARES[each] for each in names[index:])
        command = commands(out, asked.tests, asked.tiny, dict.fromkeys(SHARES, share))[name]
        with log.open("a") as stream:
            stream.write(f"\n=== {name}: at most {share:.0f} s\n")
        at, size = time.monotonic(), log.stat().st_size
        code = run(command, log, share) if share > 1 else 124
        parts[name] = {"code": code, "seconds": round(time.monotonic() - at, 1), "limit": round(share, 1)}
        state = "passed" if code == 0 else "ran out of time" if code == 124 else f"failed with {code}"
        print(f"{name}: {state} after {parts[name]['seconds']:.0f} of {share:.0f} s")
        print("\n".join(log.read_bytes()[size:].decode(errors="replace").splitlines()[-30:]), flush=True)
        (out / "session.json").write_text(json.dumps({"command": sys.argv, "machine": json.loads(machine.stdout),
                                                       "parts": parts}, indent=1))  # fmt: skip
        for found in [] if asked.tiny else DATA.glob("*.json"):
            shutil.copy(found, out)
    print({name: each["code"] for name, each in parts.items()})
    return 1 if any(each["code"] for each in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
