"""``build``: a model of transformers without weights. Only classes that are built into transformers are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qserve.checkpoint.errors import CheckpointError
from qserve.runtime.fallback.unsupported import Unsupported

NAME = "qserve"
"""Under which our attention and our experts are registered with transformers."""

_SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def configuration(config: dict[str, Any], name: str) -> PretrainedConfig:
    """Read ``config`` (the content of config.json). Raises ``CheckpointError`` where transformers has no causal
    language model of this type, or the configuration is not valid."""
    kind = config.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        remote = "; the code that comes with it is never run" if "auto_map" in config else ""
        raise CheckpointError(f"{name} is of type {kind!r}, of which transformers has no causal language model{remote}")
    plain = {key: config[key] for key in config.keys() - {"quantization_config", "model_type", "auto_map"}}
    try:
        return AutoConfig.for_model(str(kind), **plain)
    except Exception as error:  # transformers validates with several kinds of exception
        raise CheckpointError(f"{name}: config.json is not a valid {kind} configuration: {error}") from None


def build(config: PretrainedConfig) -> PreTrainedModel:
    """The model of ``config`` in float32. Its parameters are zeros that take no memory; its buffers are real. The
    language model alone of a type that also takes images, where transformers has a class for that."""
    owner = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
    text = config.get_text_config(decoder=True) if config.sub_configs else config
    if isinstance(text, owner.config_class):
        config = text
    if owner._is_stateful:
        raise Unsupported("recurrence: a state besides keys and values")
    if other := set(getattr(text, "layer_types", None) or ()) - _SERVED_LAYERS:
        raise Unsupported(f"layers of type {', '.join(sorted(other))}")
    use(config, NAME)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            model: PreTrainedModel = owner._from_config(config, dtype=torch.float32)
    except KeyError as error:
        if error.args == (NAME,):
            raise Unsupported("no attention that calls transformers' AttentionInterface") from None
        raise
    model.eval().requires_grad_(False)
    for module, name, buffer in _buffers(model):
        module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()  # does nothing to what is on the meta device, and computes the buffers
    model.tie_weights()
    hollow: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zeros = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
                module._parameters[name] = hollow.setdefault(id(parameter), nn.Parameter(zeros, requires_grad=False))
    return model


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def configurations(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            yield from configurations(part)


def use(config: PretrainedConfig, implementation: str) -> None:
    """Let ``implementation`` compute attention and experts."""
    for part in configurations(config):
        part._attn_implementation_internal = implementation
        part._experts_implementation_internal = implementation


def switch(model: PreTrainedModel, implementation: str) -> None:
    """The same in a model that is built; parts of it may have configurations of their own."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            use(config, implementation)


_CACHED_TOKENS = {"past_key_values_length", "cache_length"}
"""What such a module counts on from, by the names of two ages of transformers."""


class Positions:
    """Gives a model the positions of a row of tokens, however it takes them: as ``position_ids``, counted from a
    padding index (RoBERTa), or in a module that otherwise counts for itself (BART)."""

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = signature(model.forward).parameters
        self._named = "position_ids" in parameters
        self._cached = "use_cache" in parameters
        self._now: Tensor | None = None
        self._offset, counting = 0, False
        for module in model.modules():
            if hasattr(module, "create_position_ids_from_input_ids"):
                self._offset = int(module.padding_idx) + 1  # type: ignore[arg-type]
            taken = signature(module.forward).parameters.keys()
            if not self._named and "position_ids" in taken and taken & _CACHED_TOKENS:
                module.forward, counting = partial(self._counted, module.forward), True
        if not self._named and not counting:
            if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
                raise Unsupported("positions that it counts for itself")
            self._named = True

    def _counted(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **({**kwargs, "position_ids": self._now} if self._now is not None else kwargs))

    def call(self, model: PreTrainedModel, ids: Tensor, positions: Tensor | None) -> Any:
        """``model`` on the row ``ids`` [tokens], int64. ``positions`` None: as it counts them itself."""
        given: dict[str, Any] = {"use_cache": False} if self._cached else {}
        if positions is not None and self._named:
            given["position_ids"] = (positions + self._offset)[None]
        self._now = positions
        try:
            return model(input_ids=ids[None], **given)
        finally:
            self._now = None
