"""``attend``: the attention function that transformers' modules call, and ``PagedAttention``, which computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from qserve.kernels import pages
from qserve.kernels.executor import Executor, Program, Step
from qserve.kernels.ops import BLOCK_SIZE, Attention, Op, RopeKV
from qserve.runtime.cache import CacheLayout, CacheSpec
from qserve.runtime.fallback.skeleton import NAME
from qserve.runtime.fallback.unsupported import Unsupported

_IGNORED = {"dropout", "position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states",
            "logits_to_keep", "cache_position", "return_dict", "layer_idx"}  # fmt: skip
_LANES = 16
"""The kernels take multiples of so many elements of a head."""


@dataclass(frozen=True)
class AttentionCall:
    """What one call of the attention function asks for, whatever the tokens."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    @classmethod
    def of(
        cls, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
        options: dict[str, Any],
    ) -> AttentionCall:
        """Raises ``Unsupported`` for whatever the kernels do not compute."""
        window, softcap = options.pop("sliding_window", None), options.pop("softcap", None)
        if options.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
            raise Unsupported("attention in both directions")
        if mask is not None:
            raise Unsupported("an attention mask of its own")
        for name, given in options.items():
            if name not in _IGNORED and given is not None and given is not False:
                raise Unsupported(f"attention with {name}")
        if len(query) != 1 or query.shape[2] != key.shape[2]:
            raise Unsupported("attention to other than the row's own tokens")
        dim = query.shape[3]
        scale = dim**-0.5 if scaling is None else float(scaling)
        return cls(
            query.shape[1], key.shape[1], dim, value.shape[3], scale, int(window or 0), float(softcap or 0)
        )


class Handler(Protocol):
    def __call__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attended values [1, tokens, heads, value_dim] for query [1, heads, tokens, key_dim], key [1, kv_heads,
        tokens, key_dim] and value [1, kv_heads, tokens, value_dim]."""
        ...


_HANDLER: ContextVar[Handler] = ContextVar("attention of the model that runs")


@contextmanager
def attending(handler: Handler) -> Iterator[None]:
    """In this context ``handler`` computes attention."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' ``AttentionInterface``."""
    call = AttentionCall.of(module, query, key, value, attention_mask, scaling, options)
    return _HANDLER.get()(call, query, key, value), None


AttentionInterface.register(NAME, attend)


def cache_layout(calls: Sequence[AttentionCall]) -> CacheLayout:
    """The cache of a model that attends by ``calls``, each of which keeps its own keys and values. Heads are padded,
    so that all calls keep equally much."""
    heads = lcm(*(call.kv_heads for call in calls)) * _LANES
    widest = max(call.kv_heads * -(-max(call.key_dim, call.value_dim) // _LANES) * _LANES for call in calls)
    width = -(-widest // heads) * heads
    return CacheLayout.of([CacheSpec(call.kv_heads, width // call.kv_heads, call.window) for call in calls])


class PagedAttention:
    """Attention of the calls of a model, in the order in which they come, over a paged cache of ``num_blocks``.

    ``kv`` [places, 2, blocks, kv_heads * head_dim * 16]. ``fallbacks`` are the operations that it takes of each layer.
    """

    def __init__(
        self, calls: Sequence[AttentionCall], executor: Executor, *, max_tokens: int, positions: int, num_blocks: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.layout = layout = cache_layout(calls)
        spec = layout.groups[0].spec
        width = spec.kv_heads * spec.head_dim * BLOCK_SIZE
        self.kv = pages.empty((layout.places, 2, num_blocks, width), dtype)
        self._calls = calls
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._programs: list[tuple[int, Program, Tensor, Tensor]] = []
        self.ops: list[Op] = []
        for i, call in enumerate(calls):
            group, place = layout.place(i)
            dim = layout.groups[group].spec.head_dim
            shape = call.heads, call.kv_heads, dim, call.key_dim, call.value_dim
            if shape not in self._buffers:
                self._buffers[shape] = (
                    torch.zeros(max_tokens, call.heads + 2 * call.kv_heads, dim),
                    torch.empty(max_tokens, call.heads, dim),
                )
            qkv, out = self._buffers[shape]
            keys = self.kv[place, 0].view(num_blocks, call.kv_heads, dim, BLOCK_SIZE)
            values = self.kv[place, 1].view(num_blocks, call.kv_heads, BLOCK_SIZE, dim)
            none = torch.empty(positions, 0)  # nothing is rotated here
            program = executor.program(max_tokens)
            rows, (heads, kv_heads) = qkv.flatten(1), shape[:2]
            ops: list[Op] = [
                RopeKV(rows, none, none, keys, values, heads, kv_heads, dim),
                Attention(
                    rows, out.flatten(1), keys, values, heads, kv_heads, dim, call.scale, call.window,
                    softcap=call.softcap,
                ),
            ]  # fmt: skip
            program.add(ops)
            self.ops += ops
            self._programs.append((group, program, qkv, out))
        self._steps: Sequence[Step] = ()
        self._next = 0

    @contextmanager
    def step(self, steps: Sequence[Step]) -> Iterator[None]:
        """In this context a model attends for ``steps``, one for each group of the layout."""
        self._steps, self._next = steps, 0
        with attending(self):
            yield
        if self._next != len(self._calls):
            raise Unsupported("attention that is not called in every step")

    def __call__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._next == len(self._calls) or call != self._calls[self._next]:
            raise Unsupported("attention that changes from step to step")
        group, program, qkv, out = self._programs[self._next]
        self._next += 1
        step, tokens = self._steps[group], query.shape[2]
        rows, heads, keys = qkv[:tokens], call.heads, call.heads + call.kv_heads
        rows[:, :heads, : call.key_dim] = query[0].transpose(0, 1)
        rows[:, heads:keys, : call.key_dim] = key[0].transpose(0, 1)
        rows[:, keys:, : call.value_dim] = value[0].transpose(0, 1)
        program.run(step)
        return out[None, :tokens, :, : call.value_dim].clone()
