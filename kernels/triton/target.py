"""Which GPU kernels are prepared for, and whether Triton's interpreter stands in for one.

Knows devices; does not know kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton import knobs

Capability = tuple[int, int]

MINIMUM: Capability = (8, 0)
"""The oldest architecture with asynchronous copies and bfloat16 matrix units."""
FP8: Capability = (8, 9)
"""The oldest architecture with e4m3."""

SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
"""Shared memory that one program may have."""
_LEAST_SHARED = 99 << 10


@dataclass(frozen=True)
class Target:
    """A GPU as kernels see it. ``sms``: streaming multiprocessors; ``shared_bytes``: of one program."""

    name: str
    capability: Capability
    sms: int
    shared_bytes: int


DEFAULT = Target("none", (9, 0), 132, SHARED_BYTES[9, 0])
"""What is assumed where there is no GPU: an H100 or H200, so that the interpreter runs what they would."""


def is_interpreted() -> bool:
    """Whether kernels that are imported now run in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return bool(knobs.runtime.interpret)


def shared_bytes(capability: Capability) -> int:
    """Shared memory of one program; that of the smallest for architectures not listed."""
    return SHARED_BYTES.get(capability, _LEAST_SHARED)


@lru_cache
def target(device: torch.device) -> Target:
    """What ``device`` is, or ``DEFAULT`` where it is no GPU."""
    if device.type != "cuda":
        return DEFAULT
    found = torch.cuda.get_device_properties(device)
    capability = (found.major, found.minor)
    return Target(found.name, capability, found.multi_processor_count, shared_bytes(capability))


def missing() -> str | None:
    """None where kernels can run here, on a GPU or in the interpreter; otherwise the reason why not."""
    if is_interpreted():
        return None
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is visible"
    capability = torch.cuda.get_device_capability()
    if capability < MINIMUM:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0"
    return None
