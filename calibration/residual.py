"""Which linears add to the residual stream, found by running a block, and what the stream was before them.

An error of the stream stays in it to the end of the model. Only the linears that add to it can take some of it away.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from threading import local

import torch
from torch import Tensor, nn

from qserve.calibration.skeleton import Call


@torch.no_grad()
def adding_linears(block: nn.Module, linears: Mapping[str, nn.Linear], hidden: Tensor, call: Call) -> dict[str, str]:
    """For each of ``linears`` whose output is added to the stream as it is: the submodule of ``block`` whose input is
    the stream before that ("" is the block itself).

    ``hidden`` float32 [1, few tokens, width] with its ``call``. A sum counts where a later module, or the block, gives
    just those numbers: what a norm or a factor changes first is left out, and what several linears add at once.
    """
    seen: list[tuple[str, Tensor]] = []
    outputs: dict[str, tuple[int, Tensor]] = {}

    def note(path: str, _: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].shape == hidden.shape:
            seen.append((path, args[0].clone()))

    def added(name: str, _: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
        if output.shape == hidden.shape and bool(output.any()):
            outputs[name] = len(seen), output.clone()

    with ExitStack() as stack:
        for path, module in block.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(note, path)).remove)
        for name, linear in linears.items():
            stack.callback(linear.register_forward_hook(partial(added, name)).remove)
        result = block(hidden, *call.args, **call.kwargs)
    last = result[0] if isinstance(result, tuple) else result
    found = {}
    for name, (at, output) in outputs.items():
        later = [each for _, each in seen[at:]] + [last]
        for path, before in reversed(seen[:at]):
            if any(torch.equal(before + output, each) for each in later):
                found[name] = path
                break
    return found


class Streams:
    """The residual stream before linears, while forwards of ``block`` run. Each thread sees its own forward.

    ``places``: as ``adding_linears`` gives them. A context manager.
    """

    def __init__(self, block: nn.Module, places: Mapping[str, str]) -> None:
        self._block, self._places, self._here = block, places, local()

    def __enter__(self) -> Streams:
        self._handles = [
            self._block.get_submodule(path).register_forward_pre_hook(partial(self._note, path))
            for path in set(self._places.values())
        ]
        return self

    def _note(self, path: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        setattr(self._here, path, args[0])

    def before(self, name: str) -> Tensor | None:
        """[samples, tokens, width] in the forward that is now in front of the linear ``name`` or behind it; None where
        that adds to no stream."""
        return getattr(self._here, self._places[name]) if name in self._places else None

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
