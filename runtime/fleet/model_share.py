"""``ModelShare``: what one of several models gets of a machine. It imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShare:
    """Attributes:
    name: what requests call it.
    model: what was asked for: a directory, a hub id, a file.
    kv_cache_memory: bytes.
    threads: of the CPU kernels.
    cpu_list: the CPUs that they are pinned to; None leaves them to the system.
    """

    name: str
    model: str
    kv_cache_memory: int
    threads: int
    cpu_list: tuple[int, ...] | None
