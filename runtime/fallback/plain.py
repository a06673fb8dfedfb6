"""``plainly``: a model as plain transformers and torch compute it, with one weight in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from qserve.runtime.fallback.parameters import Parameters
from qserve.runtime.fallback.recording import Recording, expert_parameters
from qserve.runtime.fallback.skeleton import NAME, switch


class _Reading(TorchFunctionMode):
    """Torch's own products of parameters that are read when they are needed, in float32."""

    def __init__(self, found: Recording, parameters: Parameters) -> None:
        super().__init__()
        self._found, self._parameters = found, parameters

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, found = list(args), self._found
        place = {F.linear: 1, F.embedding: 1, torch.addmm: 2}.get(func)
        if place is not None and id(args[place]) in (found.tables if func is F.embedding else found.linears):
            args[place] = read(self._parameters, args[place])
        return func(*args, **(kwargs or {}))


def read(parameters: Parameters, parameter: nn.Parameter) -> torch.Tensor:
    """``parameter`` as the checkpoint has it, float32."""
    return parameters.tensor(parameters.name(parameter), parameter.shape).float()


@contextmanager
def plainly(model: PreTrainedModel, found: Recording, parameters: Parameters) -> Iterator[None]:
    """In this context ``model`` attends by transformers' eager attention and computes by torch."""

    def fill(module: nn.Module, args: Any) -> None:
        for parameter in expert_parameters(module):
            parameter.data = read(parameters, parameter)

    def empty(module: nn.Module, args: Any, output: Any) -> None:
        for parameter in expert_parameters(module):
            parameter.data = torch.zeros(()).expand(parameter.shape)

    hooks = [hook for module in found.experts
             for hook in (module.register_forward_pre_hook(fill), module.register_forward_hook(empty))]  # fmt: skip
    switch(model, "eager")
    try:
        with _Reading(found, parameters):
            yield
    finally:
        switch(model, NAME)
        for hook in hooks:
            hook.remove()
