"""``qserve doctor``: the kernels of this machine."""

from __future__ import annotations

from qserve import console


def doctor() -> None:
    """Say which kernels this machine can run, what is missing, and what that costs; each GPU kernel by name."""
    from importlib.metadata import PackageNotFoundError, version

    from qserve.evals.report import environment
    from qserve.kernels import process_group, registry
    from qserve.kernels.threads import cpu_ranges, default_threads, usable_cpus

    for key, value in environment().items():
        console.line(f"{key:<13}{value}")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed (no GPU kernels on this platform)"
    console.line(f"{'Triton':<13}{triton}")
    cpus = usable_cpus()
    pinning = "threads cannot be pinned here" if cpus is None else f"CPUs {cpu_ranges(cpus)} for --cpu-list"
    console.line(f"{'threads':<13}{default_threads()} unless --threads says otherwise; {pinning}")
    for executor in registry.executors():
        state = f"available ({executor.detail})" if executor.reason is None else f"missing: {executor.reason}"
        console.line(f"{executor.name:<13}{state}")
        if executor.reason is not None:
            console.line(f"{'':<13}without it: {executor.cost}")
        if executor.name == "native" and executor.reason is None:
            lacking = registry.without_kernels()
            state = f"computed by the torch reference: {', '.join(lacking)}" if lacking else "each has a kernel"
            console.line(f"{'':<13}{'operations':<16}{state}")
        if executor.name == "triton":
            for name, state in registry.triton_kernels():
                console.line(f"{'':<13}{name:<16}{state}")
            for line in registry.configurations():
                console.line(f"{'':<13}{'configurations':<16}{line}")
    missing = process_group.missing()
    console.line(f"{'ranks':<13}of CPUs through shared memory; of GPUs {f'not: {missing}' if missing else 'by NCCL'}")
    console.line(f"{'selected':<13}{registry.make().name}")
