"""``mix``: the function of experts that transformers' modules call, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from qserve.runtime.fallback.skeleton import NAME

Mixer = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""The weighted sum [tokens, hidden] of the experts index [tokens, k] of a module, for hidden [tokens, hidden] and
weights [tokens, k]."""

_MIXER: ContextVar[Mixer] = ContextVar("experts of the model that runs")


@contextmanager
def mixing(mixer: Mixer) -> Iterator[None]:
    """In this context ``mixer`` computes experts."""
    token = _MIXER.set(mixer)
    try:
        yield
    finally:
        _MIXER.reset(token)


def mix(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' ``ExpertsInterface``."""
    return _MIXER.get()(module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, mix)
