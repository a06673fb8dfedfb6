"""``Efficiency``: how much of a data sheet is reached."""

from __future__ import annotations

from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError

ALL_REDUCE = 6.6e-6
"""Seconds that an all-reduce takes before its first hop. NCCL's own cost model for its ring and its protocol of least
latency, LL (NCCL, src/tuning/cost_model.cc, ncclTunerConstantsDefaults)."""


@dataclass(frozen=True)
class Efficiency:
    """The share of the data sheet's values that is reached. The defaults are assumptions: measure, and give your own.

    Attributes:
        mfu: of the operations per second, in products that are bound by them.
        mbu: of the memory bandwidth, in products that are bound by it.
        link: of the bandwidth between GPUs.
        all_reduce: seconds that an all-reduce takes before its first hop.
        memory: of the memory; the rest is for activations, the driver and fragments.
        overhead: seconds that a step takes beside its kernels (scheduling, launches, sampling).
        utilization: of what a replica can serve, so that bursts do not queue.
    """

    mfu: float = 0.5
    mbu: float = 0.7
    link: float = 0.7
    all_reduce: float = ALL_REDUCE
    memory: float = 0.9
    overhead: float = 0.001
    utilization: float = 0.8

    def __post_init__(self) -> None:
        for name in ("mfu", "mbu", "link", "memory", "utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"--{name} must be more than 0 and at most 1, not {getattr(self, name)}")
        if not 0 <= self.all_reduce < 1:
            raise UsageError(f"an all-reduce must take from 0 to 1 s, not {self.all_reduce} s")
        if not 0 <= self.overhead < 10:
            raise UsageError(f"the overhead of a step must be from 0 to 10 s, not {self.overhead} s")
