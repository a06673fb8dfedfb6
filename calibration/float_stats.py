"""``FloatStats``: what the inputs of a model's linears look like while nothing is rounded, one block after the other.

Knows how text passes through the blocks; does not know what the statistics are for.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from qserve.calibration.activations import Activations
from qserve.calibration.groups import Hooks, shared_inputs
from qserve.calibration.products import fast_products
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.stats import LayerStats

# Samples in a forward at once, and the tokens that are enough to see which linears share an input.
_AT_ONCE, _FEW = 4, 4


class FloatStats:
    """``windows`` int64 [samples, length] is the text; ``offload`` a directory for hidden states."""

    def __init__(self, skeleton: Skeleton, windows: Tensor, offload: Path | None = None) -> None:
        samples, length = windows.shape
        self._skeleton = skeleton
        self._states = Activations(samples, length, skeleton.hidden_size, offload)
        self._calls, self._few = skeleton.stem(windows, _FEW, self._states)

    @torch.no_grad()
    def of(self, index: int) -> list[tuple[tuple[str, ...], LayerStats]]:
        """(linears that share an input, its statistics with the Hessian) of block ``index``, which is loaded; those
        that no token reached are left out. To be called for every block, in order."""
        block, linears, call = self._skeleton.block(index), self._skeleton.linears(index), self._calls[index]
        groups = shared_inputs(block, linears, self._states.read(0, 1)[:, :_FEW], self._few[index])
        stats: dict[str, LayerStats] = {}

        def before(name: str, inputs: Tensor) -> None:
            stats.setdefault(name, LayerStats(inputs.shape[-1])).update(inputs)

        with Hooks({group[0]: linears[group[0]] for group in groups}, before), fast_products():
            for start in range(0, self._states.shape[0], _AT_ONCE):
                part = self._states.read(start, min(start + _AT_ONCE, self._states.shape[0]))
                result = block(part, *call.args, **call.kwargs)
                self._states.write(start, (result[0] if isinstance(result, tuple) else result).float())
        return [(tuple(group), stats[group[0]]) for group in groups if group[0] in stats]
