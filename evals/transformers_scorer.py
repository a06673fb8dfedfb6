"""``TransformersScorer``: the log-probabilities of a model that has no native decoder, computed by transformers.

It runs a checkpoint of any architecture with dequantized weights. Inputs are rounded as the checkpoint says, and keys
and values as its cache would round them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from qserve.calibration.kv import cached
from qserve.calibration.skeleton import Skeleton
from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.kv import key_center, kv_scales
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.spec import ActivationScheme
from qserve.kernels.executor import CPU
from qserve.kernels.reference import decode_kv, encode_kv, round_input
from qserve.runtime.gpu_memory import GpuMemory
from qserve.runtime.memory import available_memory

# Of a GPU's memory that is free, what a model may take: activations and logits need some.
_SHARE = 0.7
# Rows of log-probabilities that are handed out at once.
_CHUNK = 128
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def device_for(nbytes: int) -> torch.device:
    """A GPU that has room for so many bytes of weights, else the CPU."""
    if not torch.cuda.is_available():
        return CPU
    gpu = torch.device("cuda", torch.cuda.current_device())
    return gpu if nbytes <= _SHARE * GpuMemory(gpu).free() else CPU


class TransformersScorer:
    """``source`` in memory, in float32: of a GPU where there is one with room for it. Raises ``CapacityError`` where it
    does not fit, and the errors of ``Skeleton``."""

    def __init__(self, source: ModelSource) -> None:
        needed, there = 4 * source.parameters(), available_memory()
        self._device = device_for(needed)
        if self._device.type == "cpu" and needed > there:
            raise CapacityError(
                f"{source.name} is measured by transformers in float32, which takes {needed / 2**20:,.0f} MiB; "
                f"{there / 2**20:,.0f} MiB are free"
            )
        self.source = source
        self.model_name = source.name
        self.tokenizer = source.tokenizer()
        self._model = Skeleton(source, self._device).load_all()
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)
        self._kv: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._center: dict[nn.Module, Tensor] = {}
        if source.spec is not None:
            self._round_inputs()
        # A dynamic cache is that of our own kernels: without them it is not served.
        if source.spec is not None and source.spec.kv_cache is not None and not source.spec.kv_cache.dynamic:
            self._kv_dtype = _KV_DTYPES[source.spec.kv_cache.dtype]
            for name, module in self._model.named_modules():
                if (scales := kv_scales(source, name)) is not None:
                    keys, values = (scale.to(self._device) for scale in scales)
                    self._kv[module] = keys, values
                    center = key_center(source, name)
                    center = torch.zeros(()) if center is None else center[:, None]
                    self._center[module] = center.to(self._device)

    @torch.no_grad()
    def score(self, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
        """``(position, float32 [n, vocab])``: row i holds the log-probabilities of the token at position + i + 1.

        The logits of all tokens are in memory at once.
        """
        with cached(self._model, self._round_kv) if self._kv else nullcontext(), torch.device(self._device):
            logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        for start in range(0, len(tokens), _CHUNK):
            yield start, logits[start : start + _CHUNK].float().log_softmax(-1).cpu()

    def _round_inputs(self) -> None:
        assert self.source.spec is not None
        modules = dict(self._model.named_modules())
        for name in self.source.linears():
            activations = self.source.spec.activations_of(name)
            if activations is not None and isinstance(modules[name], nn.Linear):
                scale = None if activations.dynamic else self.source.linear(name).input_scale
                modules[name].register_forward_pre_hook(_rounding(activations, scale))

    def _round_kv(self, module: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if module not in self._kv:
            return keys, values
        k_scale, v_scale = self._kv[module]
        center = self._center[module]  # added again: an attention with a soft cap does see it
        return self._cached(keys - center, k_scale) + center, self._cached(values, v_scale)

    def _cached(self, states: Tensor, scale: Tensor) -> Tensor:
        """[batch, kv_heads, tokens, head_dim], rounded as the cache stores it."""
        by_head = states.movedim(1, -2)
        scale = scale.expand(by_head.shape[-2])
        return decode_kv(encode_kv(by_head, scale, self._kv_dtype), scale).movedim(-2, 1)


def _rounding(activations: ActivationScheme, scale: float | None) -> Callable[[nn.Module, Any], tuple[Tensor]]:
    return lambda linear, args: (round_input(args[0], activations, scale),)
