"""Which executors this machine has, why the others are not available, and which one a program gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import get_args

import torch

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.kernels import native
from qserve.kernels.abi import name_of
from qserve.kernels.executor import Executor
from qserve.kernels.ops import AllReduce, ExpertSum, Op
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.threads import default_threads


@dataclass(frozen=True)
class ExecutorStatus:
    """An executor, and why it is not available here: ``reason`` is None where it is."""

    name: str
    detail: str
    reason: str | None
    cost: str  # what running without it means


def triton_missing() -> str | None:
    """None where the GPU kernels run here, on a GPU or in Triton's interpreter; otherwise the reason."""
    if find_spec("triton") is None:
        return "triton is not installed (no GPU kernels on this platform)"
    from qserve.kernels.triton import target, toolchain  # Triton takes a while to import, and few commands need it

    return target.missing() or (None if target.is_interpreted() else toolchain.missing())


def _gpu() -> bool:
    """Whether there is a GPU that the kernels are for, even if something else is missing."""
    if find_spec("triton") is None or not torch.cuda.is_available():
        return False
    from qserve.kernels.triton import target

    return target.missing() is None


def executors() -> list[ExecutorStatus]:
    """Every executor, best first."""
    missing = native.missing()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton's interpreter, for tests"
    detail = "" if missing else f"best of {', '.join(native.available())} here: {native.best_isa()}"
    if not_run := native.not_run():
        detail += f"; compiled, not run: {', '.join(not_run)}"
    return [
        ExecutorStatus("triton", gpu, triton_missing(), "models are computed on the CPU"),
        ExecutorStatus("native", detail, missing, "about 10 times slower, and results that vary with the batch"),
        ExecutorStatus("reference", "torch, for tests and as a last resort", None, ""),
    ]


def triton_kernels() -> list[tuple[str, str]]:
    """Each Triton kernel: what it computes, and if it is not used here, why."""
    if find_spec("triton") is None:
        return []
    from qserve.kernels.triton import support, target

    missing, found = triton_missing(), target.described(target.architecture()) if torch.cuda.is_available() else None
    listed = []
    for kernel in support.KERNELS:
        reason = missing
        if missing is None and found is None:
            reason = "Triton's interpreter, for tests"
        elif found is not None and kernel.needs is not None and kernel.needs not in found.features:
            reason = f"it needs {target.NEEDED[kernel.needs]}, the GPU is {found.architecture}"
        listed.append((kernel.name, kernel.computes if reason is None else f"{kernel.computes}; not used: {reason}"))
    return listed


def configurations() -> list[str]:
    """The configurations by which this machine's GPU computes products, in lines."""
    missing = triton_missing()
    if missing is None and not torch.cuda.is_available():
        missing = "Triton's interpreter needs none"
    if missing is not None:
        return [f"not used: {missing}"]
    from qserve.kernels.triton import target
    from qserve.kernels.triton.tuning import autotune, tuned

    gpu = target.target(torch.device("cuda", torch.cuda.current_device()))
    cache = autotune.cache_file(gpu)
    kept = [f"with --autotune those in {cache}"] if cache.exists() else []
    return [*tuned.in_use(gpu).lines(), *kept]


def require_autotune(executor: Executor) -> None:
    """Raise ``UsageError`` with the reason where ``executor`` has no configurations that could be timed."""
    reason = None
    if executor.name != "triton":
        reason = f"the {executor.name} kernels have no configurations; {triton_missing() or 'choose --kernels triton'}"
    elif executor.placement.device.type != "cuda":
        reason = "kernels are timed on a GPU, and Triton's interpreter is not one"
    elif executor.batch_invariant:
        reason = "the configurations of --kernels triton-invariant are fixed, or results would vary with the batch"
    if reason is not None:
        raise UsageError(f"--autotune: {reason}")


def settle(executor: Executor, autotune: bool = False, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Decide how ``executor`` divides the products of its programs, before the first step. Returns notes on that, in
    lines.

    ``autotune`` times products that were not timed here before, if ``require_autotune`` allowed it; ``progress`` counts
    them.
    """
    if executor.name != "triton" or executor.placement.device.type != "cuda" or executor.batch_invariant:
        return []
    from qserve.kernels.triton.executor import TritonExecutor
    from qserve.kernels.triton.tuning import autotune as tuning
    from qserve.kernels.triton.tuning import tuned

    assert isinstance(executor, TritonExecutor)
    if not autotune:
        table = tuned.in_use(executor.target)
        tuning.prove(executor.products, executor.target, table)
        return [f"configurations of products: {line}" for line in table.lines()]
    tuner = tuning.tuner(executor.placement.device)
    found = tuning.autotune(executor.products, executor.target, tuner, tuning.cache_file(executor.target), progress)
    return [f"configurations of products: {line}" for line in found.lines()]


def compile_kernels(executor: Executor, work: Callable[[], None]) -> None:
    """If ``executor`` compiles kernels at their first launch, compile those of ``work`` now, as many at a time as there
    are threads: one after another they take a minute. The results of ``work`` are rubbish."""
    if executor.name != "triton" or executor.placement.device.type != "cuda":
        return
    from qserve.kernels.triton.launch import compiling

    with compiling(default_threads()):
        work()


def names() -> list[str]:
    """What ``--kernels`` accepts: auto, an executor, the Triton kernels with results that do not vary with the batch,
    or an ISA of the native ones."""
    return ["auto", "triton", "triton-invariant", "native", *[f"native-{isa}" for isa in native.ISAS], "reference"]


def make(
    name: str = "auto", threads: int | None = None, activations: torch.dtype = torch.bfloat16,
    cpus: Sequence[int] | None = None, gpu: int | None = None,
) -> Executor:
    """The executor called ``name``; ``auto`` is the best that this machine has. ``activations`` is the dtype in which a
    GPU computes; everything else computes in float32. ``threads`` and ``cpus`` are for the native kernels. ``gpu``: the
    number of the one that computes, which becomes the current one; None for that which is.

    Raises ``UsageError`` for an unknown name and ``CapacityError`` for one that is not available here.
    """
    if name not in names():
        raise UsageError(f"unknown kernels {name!r}: choose from {', '.join(names())}")
    missing = native.missing()
    on_device = name.startswith("triton") or (name == "auto" and _gpu())
    if cpus is not None and (on_device or name == "reference" or (name == "auto" and missing)):
        raise CapacityError("--cpu-list pins the threads of the native kernels, and they do not compute here")
    if on_device:
        missing = triton_missing()
        if missing:
            instead = "; --kernels native computes on the CPU" if name == "auto" else ""
            raise CapacityError(f"kernels {name!r} are not available: {missing}{instead}")
        from qserve.kernels.triton.executor import TritonExecutor

        on_gpu = torch.cuda.is_available()
        if on_gpu and gpu is not None:
            torch.cuda.set_device(gpu)  # Triton launches there
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        return TritonExecutor(device, activations if on_gpu else torch.float32, invariant=name == "triton-invariant")
    if name == "reference" or (name == "auto" and missing):
        return ReferenceExecutor()
    if missing:
        raise CapacityError(f"kernels {name!r} are not available: {missing}")
    for isa in native.ISAS:
        if name == f"native-{isa}":
            if isa not in native.available():
                raise CapacityError(f"this machine has no {isa}: its best is {native.best_isa()}")
            return native.NativeExecutor(threads, isa, cpus)
    return native.NativeExecutor(threads, cpus=cpus)


def without_kernels() -> list[str]:
    """The operations for which the C library has no kernel, whatever their shapes: of those that a CPU ever runs."""
    found = (name_of(op) for op in get_args(Op) if op not in (AllReduce, ExpertSum))  # its ranks share memory
    return [name for name in found if native.missing() or name not in native.kinds()]


def fallbacks(executor: Executor, ops: Iterable[Op]) -> Counter[str]:
    """The operations among ``ops`` that have no kernel and are computed by their torch reference: a line with the name
    and the reason for each, and how often it occurs."""
    reasons = ((op, executor.supports(op)) for op in ops)
    return Counter(f"{name_of(type(op))}: {reason}" for op, reason in reasons if reason is not None)
