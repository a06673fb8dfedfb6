"""The ctypes structures agree with the C compiler: every offset and size, and the number of every name."""

from __future__ import annotations

import ctypes as C
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from qserve.kernels import abi, native
from qserve.kernels.executor import Step
from qserve.kernels.ops import Activation, Function, Op
from qserve.kernels.tiled import TiledEmbed, TiledExperts, TiledHeadLinear, TiledLinear, TiledLora

CSRC = Path(__file__).parents[2] / "kernels" / "csrc"
TILED = {
    "embed": TiledEmbed, "linear": TiledLinear, "experts": TiledExperts, "lora": TiledLora,
    "head_linear": TiledHeadLinear,
}  # fmt: skip
WITH_KERNELS = set(re.findall(r"^ *QS_([A-Z_0-9]+) = \d+,$", (CSRC / "qserve.h").read_text(), re.MULTILINE))
OPERATIONS = {
    name: TILED.get(name, op) for op in get_args(Op) for name in [abi.name_of(op)] if name.upper() in WITH_KERNELS
}
STRUCTURES: dict[str, type[C.Structure]] = {
    **{name: abi.structure(op) for name, op in OPERATIONS.items()},
    "step": abi.structure(Step),
    "scale_search": abi.ScaleSearch,
    "scale_choice": abi.ScaleChoice,
    "sweep": abi.Sweep,
    "trellis_sweep": abi.TrellisSweep,
    "row_sampling": abi.RowSampling,
    "tiling": abi.Tiling,
    "rounding": abi.Rounding,
    "moment": abi.Moment,
    "pack": abi.Pack,
    "heads": abi.Heads,
    "causal": abi.Causal,
    "product": abi.Product,
}


def compiled(lines: list[str], folder: Path) -> dict[str, int]:
    """The values of C expressions over ``qserve.h``, by the names that ``lines`` give them."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    source = folder / "layout.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "qserve.h"\n'
        f"int main(void) {{\n{chr(10).join(lines)}\nreturn 0; }}\n"
    )
    subprocess.run([compiler, "-I", str(CSRC), str(source), "-o", str(folder / "layout")], check=True)
    printed = subprocess.run([str(folder / "layout")], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in printed.splitlines())}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_library_is_built_where_there_is_a_compiler() -> None:
    """A build that fails is a warning to whoever installs; then all tests of kernels would skip."""
    assert native.missing() is None


def test_offsets_and_sizes_are_those_of_the_compiler(tmp_path: Path) -> None:
    here = {"op.size": C.sizeof(abi.operation({name: i for i, name in enumerate(OPERATIONS)}, OPERATIONS))}
    lines = ['printf("op.size %zu\\n", sizeof(qs_op));']
    for name, structure in STRUCTURES.items():
        here[f"{name}.size"] = C.sizeof(structure)
        lines.append(f'printf("{name}.size %zu\\n", sizeof(qs_{name}));')
        for field, _ in structure._fields_:  # type: ignore[misc]
            at, size = f"offsetof(qs_{name}, {field})", f"sizeof(((qs_{name} *)0)->{field})"
            here[f"{name}.{field}"] = getattr(structure, field).offset
            here[f"{name}.{field}.size"] = getattr(structure, field).size
            lines.append(f'printf("{name}.{field} %zu\\n{name}.{field}.size %zu\\n", {at}, {size});')
    assert compiled(lines, tmp_path) == here


def test_every_operation_has_its_number(tmp_path: Path) -> None:
    lines = [f'printf("{name} %d\\n", QS_{name.upper()});' for name in OPERATIONS]
    assert compiled(lines, tmp_path) == {name: kind for kind, name in enumerate(OPERATIONS)}


def test_functions_have_their_numbers(tmp_path: Path) -> None:
    numbers = compiled([f'printf("{name} %d\\n", QS_{name.upper()});' for name in get_args(Function)], tmp_path)
    for name, number in numbers.items():
        x = torch.zeros(1, 1)
        assert abi.describe(Activation(x, x, name, False), Tensor.data_ptr).function == number


def test_dtypes_have_their_numbers(tmp_path: Path) -> None:
    names = ("F32", "F16", "BF16", "U8", "U4", "F8", "I8")
    numbers = compiled([f'printf("{name} %d\\n", QS_{name});' for name in names], tmp_path)
    assert (numbers["U8"], numbers["U4"], numbers["F8"], numbers["I8"]) == (abi.U8, abi.U4, abi.F8, abi.I8)
    assert [numbers[name] for name in names[:3]] == list(abi.FLOATS.values())


@pytest.mark.parametrize(
    ("step", "same"), [("qs_step", True), ("struct { qs_step step; void *more; }", False), (None, False)]
)
def test_a_library_of_other_sources_is_not_used(
    step: str | None, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may know fewer operations. One that takes other steps, or does not say which, computes something else. One
    that lacks functions is refused as they are."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text(
        '#include <stddef.h>\n#include "qserve.h"\n'
        'const char *qs_op_name(int32_t kind) { return kind ? NULL : "linear"; }\n'
        "int32_t qs_op_size(void) { return 8 + sizeof(qs_linear); }\n"
        + ("" if step is None else f"int32_t qs_step_size(void) {{ return sizeof({step}); }}\n")
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-I", str(CSRC), str(source), "-o", str(library)], check=True)
    assert native.agrees(C.CDLL(str(library))) == same
    monkeypatch.setattr(native, "library_path", lambda: library)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    assert "built from other sources: reinstall qserve" in (native.missing() or "")
