"""``Wish``: what a plan is not free to choose."""

from __future__ import annotations

from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.evals.planner.quantization import KV_DTYPES

MOST_GPUS = 64
"""Of one replica."""


@dataclass(frozen=True)
class Wish:
    """What the user fixed; None and 0 leave the choice to the plan."""

    quantization: str | None = None
    kv_dtype: str | None = None
    tp: int = 0
    pp: int = 0
    gpu_price: float | None = None
    chunk: int = 2048
    spare: int = 0

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise UsageError(f"a KV dtype is {', '.join(KV_DTYPES)}, not {self.kv_dtype!r}")
        for name in ("tp", "pp"):
            if not 0 <= getattr(self, name) <= MOST_GPUS:
                raise UsageError(f"--{name} must be from 1 to {MOST_GPUS}, not {getattr(self, name)}")
        if not 1 <= self.chunk <= 2**20:
            raise UsageError(f"--chunk must be a number of tokens, not {self.chunk}")
        if not 0 <= self.spare <= 1000:
            raise UsageError(f"--spare must be replicas beside those that are needed, not {self.spare}")
        if self.gpu_price is not None and not 0 < self.gpu_price < 1e6:
            raise UsageError(f"--gpu-price must be dollars of one GPU for an hour, not {self.gpu_price}")
