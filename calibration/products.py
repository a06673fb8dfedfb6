"""The products of a calibration forward, in the way this processor or GPU multiplies fastest (``kernels.products``)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qserve.kernels import products


@contextmanager
def fast_products() -> Iterator[None]:
    """Compute the products of a calibration forward in bfloat16 where this processor, or the GPU of the tensors, has
    them: that is twice as fast, and the rounding is far below that of quantization. Elsewhere our kernels multiply
    float32. Hidden states and sums stay in float32."""
    rounds = products.multiplied() == torch.bfloat16
    with _autocast(*_rounding()), _Fast(rounds):
        yield


def exact_products() -> AbstractContextManager[None]:
    """Within ``fast_products``: compute in the dtype of the tensors."""
    return _autocast()


def _rounding() -> tuple[str, ...]:
    """The kinds of devices that multiply bfloat16 here."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple(each for each in devices if products.multiplied(torch.device(each)) == torch.bfloat16)


@contextmanager
def _autocast(*rounding: str) -> Iterator[None]:
    """Each kind of device has a switch of its own."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(device, torch.bfloat16, enabled=device in rounding))
        yield


class _Fast(TorchFunctionMode):
    """On the CPU: plain causal attention by our kernel. Linears by our kernel in float32, or by torch's in bfloat16,
    where an input that several linears share is rounded only once."""

    def __init__(self, rounds: bool) -> None:
        super().__init__()
        self._rounds = rounds
        self._seen: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") == self._rounds and not torch.is_grad_enabled():
            if func is nn.functional.linear and not kwargs and args[0].device.type == "cpu":
                if self._rounds:
                    args = (self._rounded(args[0]), *args[1:])
                elif all(each is None or each.dtype == torch.float32 for each in args):
                    return products.linear(*args)
            elif func is nn.functional.scaled_dot_product_attention and _is_plain(*args, **kwargs):
                scale = kwargs.get("scale")
                return products.attend_causal(*args[:3], scale=args[0].shape[-1] ** -0.5 if scale is None else scale)
        return func(*args, **kwargs)

    def _rounded(self, inputs: Tensor) -> Tensor:
        if inputs.dtype != torch.float32:
            self._seen = None
            return inputs
        if self._seen is None or self._seen[0]() is not inputs or self._seen[1] != inputs._version:
            self._seen = weakref.ref(inputs), inputs._version, inputs.to(torch.bfloat16)
        return self._seen[2]


def _is_plain(queries: Tensor, keys: Tensor, values: Tensor, *more: Any, **kwargs: Any) -> bool:
    """Whether this is causal attention of whole sequences to themselves, with nothing else, on the CPU."""
    if more or not kwargs.get("is_causal") or kwargs.get("attn_mask") is not None or kwargs.get("dropout_p"):
        return False
    if queries.dim() != 4 or keys.dim() != 4 or queries.device.type != "cpu":
        return False
    heads, kv_heads = queries.shape[-3], keys.shape[-3]
    shared = heads % kv_heads == 0 if kwargs.get("enable_gqa") else heads == kv_heads
    same = (queries.shape[0], *queries.shape[2:]) == (keys.shape[0], *keys.shape[2:]) and keys.shape == values.shape
    return same and shared and queries.shape[-1] % 2 == 0
