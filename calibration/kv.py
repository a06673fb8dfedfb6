"""The keys and values that a cache would hold, as attention gets them: after rotation, norms and biases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qserve.checkpoint.errors import UsageError

OnCache = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


@contextmanager
def cached(model: nn.Module, on_cache: OnCache) -> Iterator[None]:
    """Within the ``with``, attention inside ``model`` uses the keys and values that ``on_cache`` returns for its own.

    ``on_cache(attention module, keys, values)``: float32 [batch, kv_heads, tokens, head_dim] each.
    """
    inside = set(model.modules())

    def wrapped(usual: Callable[..., Any] | None) -> Callable[..., Any]:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Eager attention is not registered: each architecture has its own, in the file of its modules.
            compute = usual or sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
            if module in inside:
                key, value = on_cache(module, key, value)
            return compute(module, query, key, value, *args, **kwargs)

        return attend

    with ExitStack() as undo:
        for name in ("sdpa", "eager"):
            overridden = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
            usual = ALL_ATTENTION_FUNCTIONS.get(name)
            ALL_ATTENTION_FUNCTIONS[name] = wrapped(usual)
            if overridden is None:
                undo.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, name)
            else:
                undo.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, name, overridden)
        yield


class KVRecorder:
    """Notes the mean key, and the largest keys and values, that the attention of ``block`` gets within a ``with``."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._largest: tuple[Tensor, Tensor] | None = None
        self._sum, self._tokens = torch.zeros(()), 0
        self._lowest = self._highest = torch.zeros(())
        self._seen: nn.Module | None = None

    def __enter__(self) -> KVRecorder:
        self._stack = ExitStack()
        self._stack.enter_context(cached(self._block, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def is_recurrent(self) -> bool:
        """Whether the block has a recurrence in the place of attention, and so neither keys nor values."""
        return getattr(self._block, "block_type", None) == "linear_attention"

    @property
    def shift_matters(self) -> bool:
        """Whether attention changes where all scores of a query do alike: with a soft cap, or with sinks."""
        has_cap = bool(getattr(self._seen, "attn_logit_softcapping", None))
        return has_cap or getattr(self._seen, "sinks", None) is not None

    def absmax(self) -> tuple[Tensor, Tensor]:
        """(keys, values): float32 [kv_heads] each. Raises ``UsageError`` where the block's attention was not seen."""
        if self._largest is None:
            raise UsageError(f"the keys and values of {type(self._block).__name__} cannot be observed")
        return self._largest

    def key_mean(self) -> Tensor:
        """float32 [kv_heads, head_dim], over all tokens seen. Raises as ``absmax`` does."""
        self.absmax()
        return (self._sum / self._tokens).float()

    def key_spread(self) -> Tensor:
        """float32 [kv_heads]: the largest distance of a key from ``key_mean`` in any channel."""
        mean = self.key_mean()
        return torch.maximum(self._highest - mean, mean - self._lowest).amax(dim=1)

    @property
    def attention(self) -> str:
        """The name of the attention inside the block (``self_attn``), known once ``absmax`` is."""
        return next((name for name, module in self._block.named_modules() if module is self._seen), "")

    def _note(self, module: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._seen = module
        found = _by_head(keys), _by_head(values)
        low, high = (extreme.float() for extreme in keys.detach().transpose(0, 1).flatten(1, 2).aminmax(dim=1))
        if self._largest is not None:
            found = torch.maximum(found[0], self._largest[0]), torch.maximum(found[1], self._largest[1])
            low, high = torch.minimum(low, self._lowest), torch.maximum(high, self._highest)
        self._largest, self._lowest, self._highest = found, low, high
        self._sum = self._sum + keys.detach().sum(dim=(0, 2), dtype=torch.float64)
        self._tokens += keys.shape[0] * keys.shape[2]
        return keys, values


def _by_head(states: Tensor) -> Tensor:
    return states.detach().abs().amax(dim=(0, 2, 3)).float()
