"""Forms scales: one positive number per input, by which a linear's input is divided and its columns are multiplied."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# A factor within these bounds can be folded into a norm or weight stored as float16 without loss.
_SMALLEST, _LARGEST = 1e-3, 1e3


def shared(values: Tensor, channels: Tensor | None, reduce: Literal["mean", "amax"]) -> Tensor:
    """``values`` float32 [in], non-negative, made ready for a power. Inputs that share a channel of the layer before
    (``channels`` int64 [in]) get their mean or maximum. Zeros get the geometric mean of the others."""
    if channels is not None:
        merged = torch.zeros(int(channels.max()) + 1).scatter_reduce(0, channels, values, reduce, include_self=False)
        values = merged[channels]
    alive = values > 0
    if not bool(alive.any()):
        return torch.ones_like(values)
    return torch.where(alive, values, values[alive].log().mean().exp())


def normalized(scale: Tensor) -> Tensor:
    """``scale`` with a geometric mean of 1, within the bounds."""
    return (scale / scale.log().mean().exp()).clamp(_SMALLEST, _LARGEST)


def evenly(weight: Tensor, rows: int) -> Tensor:
    """At most ``rows`` rows of ``weight``, evenly spaced: enough to tell candidates apart."""
    wanted = min(len(weight), rows)
    return weight[torch.arange(wanted) * len(weight) // wanted]
