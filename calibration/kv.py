"""The keys and values that a cache would hold, as attention gets them: after rotation, norms and biases.

Knows transformers' attention interface; does not know architectures, nor how scales are chosen.
"""

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
    """While it lasts, attention inside ``model`` goes on with what ``on_cache`` makes of its keys and values.

    ``on_cache(attention module, keys, values)``: float32 [batch, kv_heads, tokens, head_dim] each.
    """
    inside = set(model.modules())

    def wrapped(usual: Callable[..., Any] | None) -> Callable[..., Any]:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Eager attention is not registered: each architecture has its own, beside its modules.
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
    """Notes the largest keys and values that the attention of ``block`` is given within a ``with``."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._largest: tuple[Tensor, Tensor] | None = None
        self._seen: nn.Module | None = None

    def __enter__(self) -> KVRecorder:
        self._stack = ExitStack()
        self._stack.enter_context(cached(self._block, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def absmax(self) -> tuple[Tensor, Tensor]:
        """(keys, values): float32 [kv_heads] each. Raises ``UsageError`` where the block's attention was not seen."""
        if self._largest is None:
            raise UsageError(f"the keys and values of {type(self._block).__name__} cannot be observed")
        return self._largest

    @property
    def attention(self) -> str:
        """The name of the attention inside the block (``self_attn``), known once ``absmax`` is."""
        return next((name for name, module in self._block.named_modules() if module is self._seen), "")

    def _note(self, module: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._seen = module
        found = _by_head(keys), _by_head(values)
        if self._largest is not None:
            found = torch.maximum(found[0], self._largest[0]), torch.maximum(found[1], self._largest[1])
        self._largest = found
        return keys, values


def _by_head(states: Tensor) -> Tensor:
    return states.detach().abs().amax(dim=(0, 2, 3)).float()
