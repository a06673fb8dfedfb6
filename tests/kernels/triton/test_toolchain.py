"""What is missing beside a GPU is said before a model is loaded, with what to do about it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qserve.checkpoint.errors import CapacityError
from qserve.kernels import registry
from qserve.kernels.triton import target, toolchain


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("CC", raising=False)
    toolchain.missing.cache_clear()
    yield
    toolchain.missing.cache_clear()


def test_this_machine_has_what_the_default_tests_need(tmp_path: Path) -> None:
    assert toolchain.missing() is None and (tmp_path / "kernels").is_dir()


def test_a_compiler_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in str(toolchain.missing())
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain.missing.cache_clear()
    assert "no C compiler" in str(toolchain.missing()) and "libc6-dev" in str(toolchain.missing())


def test_the_headers_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert f"no usable Python.h in {tmp_path}" in str(toolchain.missing()) and "python3-dev" in str(toolchain.missing())


def test_kernels_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "kernels"))
    assert "Not a directory" in str(toolchain.missing()) and "TRITON_CACHE_DIR" in str(toolchain.missing())


def test_kernels_cannot_be_run_from_where_they_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert f"{tmp_path} is mounted noexec" in str(toolchain.missing())


def test_a_gpu_that_cannot_be_used_is_no_reason_to_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(target, "is_interpreted", lambda: False)
    monkeypatch.setattr(target, "architecture", lambda device=None: "sm_90")
    with pytest.raises(CapacityError, match=r"no-such-compiler.*--kernels native computes on the CPU"):
        registry.make()
    (status,) = [each for each in registry.executors() if each.name == "triton"]
    assert "no-such-compiler" in str(status.reason)
    assert all("no-such-compiler" in state for _, state in registry.triton_kernels())
