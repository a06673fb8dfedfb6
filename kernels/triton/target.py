"""The GPU that kernels are prepared for, and whether Triton's interpreter stands in for one.

Kernels ask a ``Target`` for the features they need, never for a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
import triton
from triton import knobs

Feature = Literal["fp8", "tma", "wgmma", "tcgen05", "ptx"]
"""
fp8      products of e4m3, as the OCP defines it
tma      a copy engine that takes boxes of tensor descriptors
wgmma    the matrix unit of sm_90, which reads its left side from registers and both from shared memory
tcgen05  the matrix unit of sm_100 and sm_103, with memory of its own
ptx      kernels may contain NVIDIA assembly
"""
NEEDED = {"fp8": "compute capability 8.9 or gfx950", "tma": "compute capability 9.0"}
"""The GPUs on which a feature begins, for people."""
OLDEST = (8, 0)
"""The oldest compute capability with asynchronous copies and bfloat16 matrix units."""
AMD = ("gfx942", "gfx950")
"""For these the kernels are compiled; none has run them."""
_SHARED_KIB = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227, "gfx942": 64, "gfx950": 160}
_LEAST_SHARED_KIB = 99


@dataclass(frozen=True)
class Target:
    """A GPU as kernels see it.

    Attributes:
        architecture: "sm_90" or "gfx942".
        sms: multiprocessors, or compute units.
        shared_bytes: shared memory that one program may have.
        warp: threads that execute together.
    """

    name: str
    architecture: str
    sms: int
    shared_bytes: int
    warp: int
    features: frozenset[Feature]


def described(architecture: str) -> Target:
    """A GPU of ``architecture``. What that does not decide, and no device says, is as on an H100 (multiprocessors)."""
    shared = _SHARED_KIB.get(architecture, _LEAST_SHARED_KIB) << 10
    if architecture.startswith("gfx"):
        fp8: list[Feature] = ["fp8"] if architecture == "gfx950" else []  # e4m3 of gfx942 has another bias
        return Target("none", architecture, 132, shared, 64, frozenset(fp8))
    major, minor = capability(architecture)
    features: dict[Feature, bool] = {
        "ptx": True, "fp8": (major, minor) >= (8, 9), "tma": major >= 9, "wgmma": major == 9, "tcgen05": major == 10,
    }  # fmt: skip
    return Target("none", architecture, 132, shared, 32, frozenset(name for name, has in features.items() if has))


def capability(architecture: str) -> tuple[int, int]:
    """(9, 0) of "sm_90"."""
    found = re.fullmatch(r"sm_(\d+)(\d)", architecture)
    assert found is not None, architecture
    return int(found[1]), int(found[2])


DEFAULT = described("sm_90")
"""Assumed where there is no GPU: an H100 or H200, so that the interpreter runs the same as they would."""


def is_interpreted() -> bool:
    """Whether kernels that are imported now run in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return bool(knobs.runtime.interpret)


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels on ``device`` may contain NVIDIA assembly (PTX)."""
    return not is_interpreted() and "ptx" in target(device).features


def architecture(device: torch.device | int | None = None) -> str:
    """The architecture of a GPU that torch sees."""
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(found.gcnArchName).partition(":")[0]
    return f"sm_{found.major}{found.minor}"


@lru_cache
def target(device: torch.device) -> Target:
    """What ``device`` is, or ``DEFAULT`` where it is no GPU. Its properties come from the device itself."""
    if device.type != "cuda":
        return DEFAULT
    found = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    held = triton.runtime.driver.active.utils.get_device_properties(index)
    return replace(
        described(architecture(device)),
        name=found.name, sms=found.multi_processor_count, shared_bytes=held["max_shared_mem"], warp=found.warp_size,
    )  # fmt: skip


def missing() -> str | None:
    """None where kernels can run here, on a GPU or in the interpreter; otherwise the reason why not."""
    if is_interpreted():
        return None
    if not torch.cuda.is_available():
        return "no GPU is visible"
    found = architecture()
    if torch.version.hip is not None:
        return None if found in AMD else f"the GPU is {found}: of AMD's, the kernels are for {' and '.join(AMD)}"
    if capability(found) < OLDEST:
        return "the GPU has compute capability {}.{}, the kernels need 8.0".format(*capability(found))
    return None
