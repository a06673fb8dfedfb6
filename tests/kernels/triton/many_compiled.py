"""Some candidates of a product compiled at once, as tuning does, for an absent GPU: ``python many_compiled.py``.

Prints how many kernels the compiler made, and of how many candidates. ``TRITON_CACHE_DIR`` says where they are kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import ops
from qserve.kernels.triton import linear
from qserve.kernels.triton.launch import compiling
from qserve.kernels.triton.tuning.tune import candidates
from qserve.kernels.triton.workspace import Workspace


class Absent:
    """What Triton asks of a driver before it compiles. It launches nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    weight = QuantizedWeight(WeightScheme(4, 128), torch.zeros(128, 512, dtype=torch.uint8), torch.ones(128, 4))
    x, out = torch.zeros(16, 512, dtype=torch.bfloat16), torch.zeros(16, 128, dtype=torch.bfloat16)
    product: Any = linear.prepare(ops.Linear(x, weight, out), Workspace(torch.device("cpu")))
    choices = candidates(product, 16)[:4]
    with compiling(threads=2):
        for config in choices:
            product.configure({16: config})
            product.run(16)
    made = {(each.block_m, each.block_n, each.warps, each.stages, each.swap, each.splits > 1) for each in choices}
    print(len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))), len(made))


if __name__ == "__main__":
    main()
