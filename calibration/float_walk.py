"""``FloatWalk``: sends calibration text through the unrounded model, one block after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from qserve.calibration.activations import Activations
from qserve.calibration.groups import Hooks, shared_inputs
from qserve.calibration.products import fast_products
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.stats import LayerStats
from qserve.calibration.visit import DRY_TOKENS, Visit
from qserve.checkpoint.parts import Part

# Samples in one forward.
_AT_ONCE = 4


class FloatWalk:
    """``windows`` int64 [samples, length] is the text; ``offload`` a directory for hidden states; ``hessian`` as in
    ``LayerStats``."""

    def __init__(
        self, skeleton: Skeleton, windows: Tensor, offload: Path | None = None, *, hessian: bool = True
    ) -> None:
        samples, length = windows.shape
        self._skeleton, self._hessian = skeleton, hessian
        shape = samples, length, skeleton.hidden_size
        self._inputs = Activations(*shape, offload, skeleton.device)
        self._outputs = Activations(*shape, offload, skeleton.device)
        self._calls, self._few = skeleton.stem(windows, DRY_TOKENS, self._outputs)

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 [samples, length, width]) a few samples at a time: the inputs of the block after the one
        entered last."""
        for start in range(0, self._outputs.shape[0], _AT_ONCE):
            yield f"float.{start}", self._outputs.read(start, start + _AT_ONCE).cpu()

    def resume(self, kept: Part) -> None:
        """Go on with the block whose inputs are in ``kept``, the ``states`` of an earlier walk."""
        for start in range(0, self._outputs.shape[0], _AT_ONCE):
            self._outputs.write(start, kept.read(f"float.{start}"))

    @torch.no_grad()
    def enter(self, index: int) -> list[tuple[tuple[str, ...], LayerStats]]:
        """(linears that share an input, its statistics) of block ``index``, which must be loaded.
        Linears that no token reached are left out. Call it for every block in order, or from the resumed block on."""
        self._inputs, self._outputs = self._outputs, self._inputs
        block, linears, call = self._skeleton.block(index), self._skeleton.linears(index), self._calls[index]
        self._groups = shared_inputs(block, linears, self._inputs.read(0, 1)[:, :DRY_TOKENS], self._few[index])
        stats: dict[str, LayerStats] = {}

        def before(name: str, inputs: Tensor) -> None:
            with torch.device(inputs.device):
                stats.setdefault(name, LayerStats(inputs.shape[-1], hessian=self._hessian)).update(inputs)

        with Hooks({group[0]: linears[group[0]] for group in self._groups}, before), fast_products():
            for start in range(0, self._inputs.shape[0], _AT_ONCE):
                part = self._inputs.read(start, min(start + _AT_ONCE, self._inputs.shape[0]))
                result = block(part, *call.args, **call.kwargs)
                self._outputs.write(start, (result[0] if isinstance(result, tuple) else result).float())
        return [(tuple(group), stats[group[0]]) for group in self._groups if group[0] in stats]

    def visit(self, index: int, changed: nn.Module, after: Collection[str]) -> Visit:
        """A visit of block ``index``, which was entered last, that follows the float model. ``changed`` is a copy of
        the block whose weights are to be replaced. Its groups are the linears that run after all of ``after``."""
        name = self._skeleton.blocks[index]
        places = (place for place, group in enumerate(self._groups) if not set(group).isdisjoint(after))
        groups = self._groups[max(places, default=len(self._groups)) + 1 :]
        parts = dict(changed.named_modules(prefix=name))
        linears = {each: linear for group in groups for each in group if isinstance(linear := parts[each], nn.Linear)}
        visit = Visit(index, len(self._skeleton.blocks), name, changed, linears, groups)
        visit.inputs = visit.floats = self._inputs
        visit.call, visit.short_call = self._calls[index], self._few[index]
        visit.samples_at_once = self._inputs.shape[0]
        visit.float_block = self._skeleton.block(index)
        return visit
