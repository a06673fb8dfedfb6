"""``Eagle3Config``: what an EAGLE-3 head is made of, read from a config.json in the ``speculators`` format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qserve.checkpoint.errors import CheckpointError
from qserve.runtime.models.config import DecoderConfig, decoder_config

_LAYERS = ("llama", "qwen3")  # types of the layers that the format has
_FLAGS = ("norm_before_residual", "norm_before_fc", "embed_requires_grad", "enable_sp_ulysses")


@dataclass(frozen=True)
class Eagle3Config:
    """The head of a target (EAGLE-3, arXiv 2503.01840).

    Attributes:
        layers: the shape of its own layers. ``vocab_size`` is that of its drafts.
        target_vocab_size: of the tokens that it reads.
        hidden_layers: the layers of the target whose inputs it reads, ascending.
        hidden_size: of the target.
        norm_before_residual: the residual stream begins behind ``hidden_norm``, not before it.
        norm_before_fc: the target's states are normed together first.
    """

    layers: DecoderConfig
    target_vocab_size: int
    hidden_layers: tuple[int, ...]
    hidden_size: int
    norm_before_residual: bool
    norm_before_fc: bool


def eagle3_config(config: Mapping[str, Any], name: str, target: DecoderConfig) -> Eagle3Config:
    """Read ``config`` (the content of config.json). Raises ``CheckpointError`` for what is no head of ``target``, or is
    not computed here."""
    if config.get("speculators_model_type") != "eagle3":
        raise CheckpointError(f"{name} is no EAGLE-3 head: its config.json lacks the speculators_model_type eagle3 of "
                              "vLLM's speculators format")
    layer = config.get("transformer_layer_config")
    layer = {"model_type": "llama", **(layer if isinstance(layer, dict) else {})}
    if layer["model_type"] not in _LAYERS:
        raise CheckpointError(f"{name} has a layer of type {layer['model_type']!r}; served are {', '.join(_LAYERS)}")
    if unknown := [key for key, value in config.items() if value is True and key not in _FLAGS]:
        raise CheckpointError(f"{name} has {unknown[0]} in config.json, which is not served")
    own = decoder_config(layer, name)
    if any(own.windows):
        raise CheckpointError(f"{name} has a layer with a sliding window, which is not served for heads")
    drafts = config.get("draft_vocab_size") or own.vocab_size
    count = target.num_hidden_layers
    found = config.get("eagle_aux_hidden_state_layer_ids") or [2, count // 2, count - 3]
    if list(found) != sorted(set(found)) or not 0 <= found[0] <= found[-1] <= count:
        raise CheckpointError(f"{name} reads the hidden states of layers {list(found)}: they must ascend and be among "
                              f"the target's, 0 to {count}")
    if own.vocab_size != target.vocab_size:
        raise CheckpointError(f"{name} drafts for a vocabulary of {own.vocab_size} tokens, the model has "
                              f"{target.vocab_size}")
    modules = replace(own.modules, layers="layers", embedding="embed_tokens", norm="norm")
    return Eagle3Config(
        layers=replace(own, modules=modules, vocab_size=drafts, tie_word_embeddings=False),
        target_vocab_size=own.vocab_size,
        hidden_layers=tuple(found),
        hidden_size=target.hidden_size,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(config.get("norm_before_fc")),
    )
