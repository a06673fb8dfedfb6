"""Layers: what may import what, what is public, and what an import costs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qserve

ROOT = Path(__file__).parents[2]
LAYERS = ("checkpoint", "kernels", "runtime", "calibration", "quantize", "evals", "qserve")
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ("qserve", *path.relative_to(ROOT).parts)[: -node.level]
                base = ".".join([*package, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from ((node.lineno, str(a.value)) for a in node.args if isinstance(a, ast.Constant))


def layer_of(module: str) -> str | None:
    """The layer that ``module`` belongs to, None for packages of others."""
    first, *rest = module.split(".")
    if first != "qserve":
        return None
    return rest[0] if rest and rest[0] in LAYERS[:-1] else "qserve"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_layer_imports_only_itself_and_what_is_left_of_it(path: Path) -> None:
    own = LAYERS.index(path.relative_to(ROOT).parts[0])
    found = [(line, module, layer_of(module)) for line, module in imports(path)]
    wrong = [f"line {line}: {module}" for line, module, layer in found if layer and LAYERS.index(layer) > own]
    assert not wrong, f"{path.relative_to(ROOT)} is in {LAYERS[own]} and imports {wrong}"
    bare = [f"line {line}: {module}" for line, module, _ in found if module.split(".")[0] in LAYERS[:-1]]
    assert not bare, f"{path.relative_to(ROOT)} imports {bare} without qserve in front"


def test_no_modules_of_a_layer_import_each_other_in_a_circle() -> None:
    """Imports for types and inside functions are counted, as a reader does."""
    circles = [sorted(circle) for circle in circles_of(graph())]
    assert not circles, f"these import each other: {circles}"


def graph() -> dict[str, set[str]]:
    """What each module imports of its own layer."""
    modules = {module_name(path): path for path in FILES}

    def imported(name: str) -> str:
        """The module, where a name in it was imported."""
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    found = {module: {imported(name) for _, name in imports(path)} for module, path in modules.items()}
    return {
        module: {each for each in others if each and each != module and layer_of(each) == layer_of(module)}
        for module, others in found.items()
    }


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["qserve", *(part for part in parts if part not in ("qserve", "__init__"))])


def circles_of(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules each of which reaches all others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            for each in graph[todo.pop()] - seen:
                seen.add(each)
                todo.append(each)
        reached[start] = seen
    return {
        frozenset(each for each in seen if start in reached[each]) for start, seen in reached.items() if start in seen
    }


def test_a_circle_is_found() -> None:
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {frozenset("bc")}


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the root of the repository on ``sys.path``, as pytest and an interactive session have it."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


@pytest.mark.parametrize("layer", [name for name in LAYERS[:-1] if name != "kernels"])
def test_a_folder_is_no_package_of_its_own(layer: str) -> None:
    done = python(f"import {layer}")
    assert done.returncode != 0
    assert f"import this package as qserve.{layer}" in done.stderr


def test_kernels_by_its_bare_name_has_a_version_and_nothing_else() -> None:
    done = python("import kernels; print(kernels.__version__); import kernels.native")
    assert done.stdout.strip() == "0"
    assert "No module named 'kernels.native'" in done.stderr


def test_no_module_is_loaded_twice_in_this_session() -> None:
    twice = [name for name in sys.modules if name.split(".")[0] in LAYERS[:-1] and name != "kernels"]
    assert not twice


def test_the_public_names_are_exact() -> None:
    assert qserve.__all__ == [
        "LLM", "LoRARequest", "QServeError", "QualityCard", "QuantSpec", "SamplingParams", "__version__",
    ]  # fmt: skip
    assert all(getattr(qserve, name) is not None for name in qserve.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = qserve.Engine  # type: ignore[attr-defined]


def test_import_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "transformers", "typer", "rich", "fastapi", "datasets")
    done = python(f"import sys, qserve; print([name for name in {heavy} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom qserve.cli import app\nfrom typer.testing import CliRunner\n"
        "assert 'Commands' in CliRunner().invoke(app, ['--help']).stdout\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'fastapi') if name in sys.modules])"
    )
    assert python(code).stdout.strip() == "[]"


def seconds(*args: str) -> float:
    """The processor's seconds, which others on a busy machine do not change much; the best of five."""
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *args], check=True, capture_output=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


def test_importing_is_quick() -> None:
    assert seconds("-c", "import qserve") - seconds("-c", "pass") < 0.2


def test_help_is_quick() -> None:
    # Python, typer and what draws the help take 0.12 seconds here, and twice that on a slow machine.
    drawing = "import typer, rich.console, rich.table, rich.markdown"
    assert seconds("-m", "qserve", "--help") < 3 * seconds("-c", drawing)
