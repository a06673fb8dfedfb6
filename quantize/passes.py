"""How much of a weight one pass takes. Everything that is computed for a group, an output or a block depends on it
alone, so the size of a pass changes nothing but the time."""

from __future__ import annotations

from torch import Tensor

_ON_A_GPU = 1 << 27


def elements(weight: Tensor, on_cpu: int) -> int:
    """Elements of a pass over ``weight``: ``on_cpu``, which stay in a cache, or enough to keep a GPU busy."""
    return on_cpu if weight.device.type == "cpu" else max(on_cpu, _ON_A_GPU)
