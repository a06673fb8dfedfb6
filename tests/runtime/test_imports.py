"""The scheduler and the files below it import the standard library and each other, nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "runtime"
PURE = (
    "constraint", "sampling", "request", "step_plan", "cache", "blocks", "backlog", "fairness", "limits", "drafts",
    "scheduler", "journal", "snapshot", "stats", "router", "block_tiers", "state_slots", "digests",
)  # fmt: skip


def imported_modules(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


@pytest.mark.parametrize("name", PURE)
def test_pure_module_imports_the_standard_library_and_its_peers_only(name: str) -> None:
    allowed = sys.stdlib_module_names | {f"qserve.runtime.{peer}" for peer in PURE}
    modules = imported_modules((RUNTIME / f"{name}.py").read_text(encoding="utf-8"))
    foreign = {m for m in modules if m not in allowed and m.split(".")[0] not in sys.stdlib_module_names}
    assert not foreign, f"runtime/{name}.py imports {foreign}"


@pytest.mark.parametrize("name", PURE)
def test_pure_module_reads_no_clock_and_does_no_io(name: str) -> None:
    source = (RUNTIME / f"{name}.py").read_text(encoding="utf-8")
    acting = {
        "time",
        "datetime",
        "os",
        "io",
        "random",
        "socket",
        "threading",
        "asyncio",
        "logging",
        "pathlib",
    }
    assert not imported_modules(source) & acting
    # A call of the name alone: BlockManager.open is a method.
    calls = {
        n.func.id
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "__import__", "eval", "exec"}


def test_importing_the_scheduler_loads_no_heavy_package() -> None:
    heavy = {"torch", "numpy", "transformers"}
    code = f"import sys, qserve.runtime.scheduler; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"
