"""The C library by clang, which is the compiler of macOS. Nothing here runs what it makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kernels.test_neon import build

pytestmark = pytest.mark.slow


@pytest.fixture
def clang() -> list[str]:
    pytest.importorskip("ziglang", reason="there is no compiler for macOS here: pip install ziglang")
    return [sys.executable, "-m", "ziglang", "cc"]


def test_the_library_builds_for_apple_silicon(clang: list[str], tmp_path: Path) -> None:
    library = tmp_path / "library.dylib"
    build([*clang, "-target", "aarch64-macos"], ["-shared", "-Wno-unknown-pragmas"], library)
    assert library.read_bytes()[:8] == b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01"  # 64 bits, Arm


@pytest.mark.parametrize("name", ["isa_avx2.c", "isa_avxvnni.c"])
def test_the_assembly_of_x86_is_understood(clang: list[str], tmp_path: Path, name: str) -> None:
    """Without optimization, for the sake of time."""
    made = tmp_path / "made.o"
    build([*clang, "-target", "x86_64-macos"], ["-O0", "-c", "-Wno-unknown-pragmas"], made, only=name)
    assert made.read_bytes()[:8] == b"\xcf\xfa\xed\xfe\x07\x00\x00\x01"  # 64 bits, x86
