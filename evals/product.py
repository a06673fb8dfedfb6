"""The time of one product by the kernels that serve."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import Linear

_REPEATS = 4


def seconds(executor: Executor, weight: Tensor | QuantizedWeight, rows: int) -> float:
    """Seconds for ``rows`` inputs with ``weight``, dense or packed [out, in], once it lies in the cache. The executor
    is not asynchronous."""
    out, inp = (weight.out_features, weight.in_features) if isinstance(weight, QuantizedWeight) else weight.shape
    program = executor.program(rows)
    program.add([Linear(torch.randn(rows, inp), weight, torch.empty(rows, out))])
    index = torch.arange(rows, dtype=torch.int32)
    step = Step(index, index, index, torch.tensor([0, rows], dtype=torch.int32), index[None], index)
    program.run(step)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        program.run(step)
    return (time.perf_counter() - began) / _REPEATS
