"""Compiles Triton kernels for GPUs that this machine lacks, and reads the compiler's results.

A process either compiles or interprets (Triton decides at import), and the tests interpret. So ``compile_file`` runs
this file as a program in a process of its own: it loads a file of cases, whose ``cases()`` names what to compile,
and prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
import zlib
from base64 import b64decode, b64encode
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

NAME = "tests.kernels.triton.aot"
ROOT = Path(__file__).parents[3]
BEGIN = "compiled kernels: "


@dataclass(frozen=True)
class Compiled:
    """``cubin``: in base64; ``spills``: bytes of the stack frame, where registers go for which there is no room. For
    AMD, whose assembly is ``ptx``, the vector registers that were spilled, and no cubin."""

    ttgir: str
    ptx: str
    cubin: str
    registers: int
    spills: int
    shared_bytes: int

    @cached_property
    def sass(self) -> str:
        """The instructions. The disassembler takes half a second to start, so it runs for those that are looked at."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(b64decode(self.cubin))
            file.flush()
            return _tool(knobs.nvidia.nvdisasm.path, "-c", file.name)


@dataclass(frozen=True)
class Case:
    """One kernel, specialized. ``signature``: the type of each argument, as Triton writes it (``*fp16``, ``i32``,
    ``constexpr``); ``divisible``: the arguments that are multiples of 16, pointers among them."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    architecture: str
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = field(default=())
    maxnreg: int | None = None


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    architecture: str,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: tuple[str, ...] = (),
    maxnreg: int | None = None,
) -> Compiled:
    """Compile for ``architecture``. Only where kernels are not interpreted."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = [parameter.name for parameter in kernel.params]
    # Arguments stand in the order of the function's; constants are typed so.
    full = {name: "constexpr" if name in constexprs else signature[name] for name in order}
    attrs = {(order.index(name),): [["tt.divisibility", 16]] for name in divisible if name not in constexprs}
    source = ASTSource(kernel, full, {(order.index(name),): value for name, value in constexprs.items()}, attrs)
    if architecture.startswith("gfx"):
        options = {"num_warps": num_warps, "num_stages": num_stages}
        made = triton.compile(source, target=GPUTarget("hip", architecture, 64), options=options)
        assembly = made.asm["amdgcn"]
        registers, spills = (int(re.findall(rf"\.vgpr_{what}count: +(\d+)", assembly)[0]) for what in ("", "spill_"))
        return Compiled(made.asm["ttgir"], assembly, "", registers, spills, made.metadata.shared)
    gpu = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    made = triton.compile(source, target=gpu, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        usage = _tool(knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name)
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    stack = int(re.findall(r"STACK:(\d+)", usage)[-1])
    code = b64encode(made.asm["cubin"]).decode()
    return Compiled(made.asm["ttgir"], made.asm["ptx"], code, registers, stack, made.metadata.shared)


def loops(made: Compiled) -> list[list[str]]:
    """The instructions of every loop that multiplies, the shortest first: the innermost."""
    labels: dict[str, int] = {}
    code: list[str] = []
    found: list[list[str]] = []
    for line in made.sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            body = code[labels.get(back[1], len(code)) :] if back else []
            if any("MMA" in line for line in body):
                found.append(body)
    return sorted(found, key=len)


def loop(made: Compiled) -> list[str]:
    """The longest of them, or nothing."""
    return max(loops(made), key=len, default=[])


def parked(made: Compiled) -> int:
    """How often the loops that multiply access registers' memory. A frame of a few bytes that only what is beside them
    uses costs nothing; of a larger one every byte counts."""
    if made.spills <= 16 and made.cubin:
        return sum(bool(re.search(r"\b(LDL|STL)", line)) for body in loops(made) for line in body) if made.spills else 0
    return made.spills


def may_spill(name: str) -> bool:
    """No model is served fast in float32."""
    return "float32" in name


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_file(path: Path, function: str = "cases", timeout: float = 280, one_in: int = 1) -> dict[str, Compiled]:
    """Everything that ``function`` of the file names, or one in so many, compiled in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    beside = [str(path.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # for what the file imports
    done = subprocess.run(
        [sys.executable, "-m", NAME, str(path.resolve()), function, str(one_in)], cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(beside)}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{path.name} does not compile:\n{done.stderr[-6000:]}")
    found = json.loads(done.stdout.rpartition(BEGIN)[2])
    return {name: Compiled(**values) for name, values in found.items()}


def _turn(name: str, case: Case) -> int:
    """By the name, so that those which are chosen stay the same where others come. The architectures take turns: of two
    of them, one in two is every kernel once."""
    order = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950")
    return zlib.crc32(name.replace(case.architecture, "").encode()) + order.index(case.architecture)


_cases: dict[str, Case] = {}


def _compiled(name: str) -> dict[str, Any]:
    try:
        return asdict(compile_kernel(**vars(_cases[name])))
    except Exception as error:
        raise RuntimeError(f"{name}: {error}") from error


def _main(path: str, function: str, one_in: str) -> None:
    sys.modules[NAME] = sys.modules["__main__"]  # cases import Case from here
    named = runpy.run_path(path)[function]()
    _cases.update({name: case for name, case in named.items() if _turn(name, case) % int(one_in) == 0})
    # Forked, so that the kernels, which cannot be sent, are there already.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        print(BEGIN + json.dumps(dict(zip(_cases, pool.map(_compiled, _cases)))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
