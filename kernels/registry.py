"""Which executors this machine has, why the others are not available, and which one a program gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.kernels import native
from qserve.kernels.ops import Executor, Op
from qserve.kernels.reference import ReferenceExecutor


@dataclass(frozen=True)
class Candidate:
    """One way to compute, best first. ``reason`` is None where it is available here."""

    name: str
    detail: str
    reason: str | None
    cost: str  # what running without it means


def candidates() -> list[Candidate]:
    """Every executor, best first."""
    missing = native.missing()
    detail = "" if missing else f"best of {', '.join(native.ISAS)} here: {native.best_isa()}"
    return [
        Candidate("native", detail, missing, "about 10 times slower, and results that vary with the batch"),
        Candidate("reference", "torch, for tests and as a last resort", None, ""),
    ]


def names() -> list[str]:
    """What ``--kernels`` accepts: auto, an executor, or an ISA of the native one."""
    return ["auto", "native", *[f"native-{isa}" for isa in native.ISAS], "reference"]


def make(name: str = "auto", threads: int | None = None) -> Executor:
    """The executor called ``name``; ``auto`` is the best that this machine has.

    Raises ``UsageError`` for an unknown name and ``CapacityError`` for one that is not available here.
    """
    if name not in names():
        raise UsageError(f"unknown kernels {name!r}: choose from {', '.join(names())}")
    missing = native.missing()
    if name == "reference" or (name == "auto" and missing):
        return ReferenceExecutor()
    if missing:
        raise CapacityError(f"kernels {name!r} are not available: {missing}")
    for rank, isa in enumerate(native.ISAS):
        if name == f"native-{isa}":
            if rank > native.ISAS.index(native.best_isa()):
                raise CapacityError(f"this machine has no {isa}: its best is {native.best_isa()}")
            return native.NativeExecutor(threads, isa)
    return native.NativeExecutor(threads)


def require(executor: Executor, ops: Iterable[Op]) -> None:
    """Raise ``CapacityError`` with the reason where ``executor`` cannot run one of ``ops``."""
    for op in ops:
        reason = executor.supports(op)
        if reason is not None:
            raise CapacityError(f"the {executor.name} kernels cannot run this model: {reason}; try --kernels reference")
