"""``Classifier``: a linear head on the last hidden state of a prompt, which gives a logit for each of its classes.

It comes with a sequence-classification checkpoint, or is made of two tokens of a language model: the logit of "yes"
less that of "no" is one product with the difference of their rows in the output layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import ModelSource
from qserve.runtime.models.config import DecoderConfig, is_classifier
from qserve.runtime.models.weights import Weights

NO_YES = ("no", "yes")
Activation = Literal["sigmoid", "softmax", "identity"]


@dataclass(frozen=True)
class Classes:
    """What a head tells apart. ``activation``: what makes probabilities of its logits. ``qwen3``: two texts are
    judged in the template of Qwen3-Reranker."""

    labels: tuple[str, ...]
    activation: Activation
    qwen3: bool = False

    def probabilities(self, logits: Sequence[float]) -> list[float]:
        if self.activation == "softmax":
            return torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()  # type: ignore[no-any-return]
        if self.activation == "sigmoid":
            return [0.5 + 0.5 * math.tanh(logit / 2) for logit in logits]
        return list(logits)


@dataclass(frozen=True)
class Classifier:
    """``weight``: float64 [classes, hidden_size], on the CPU."""

    classes: Classes
    weight: Tensor


def read_classifier(source: ModelSource, config: DecoderConfig, reranker: str) -> Classifier | None:
    """The head of ``source``, None where it has none. ``reranker`` as in ``EngineConfig``.

    Raises ``CheckpointError`` where the head that the configuration or ``reranker`` asks for is not there.
    """
    stated = source.config
    qwen3 = reranker == "qwen3" or bool(stated.get("is_original_qwen3_reranker"))
    weights = Weights(source)
    if weights.has("score"):
        return Classifier(replace(_classes(config), qwen3=qwen3), _score(weights, config))
    tokens = stated.get("classifier_from_token") or (NO_YES if qwen3 else None)
    if tokens is not None:
        return Classifier(Classes(("yes",), "sigmoid", qwen3), _difference(weights, config, tokens))
    if is_classifier(stated):
        raise CheckpointError(f"{source.name} is a classifier but lacks score.weight; is the checkpoint complete?")
    return None


def _classes(config: DecoderConfig) -> Classes:
    hf = config.hf
    labels = tuple(str(label) for _, label in sorted(dict[Any, Any](hf.id2label or {}).items()))
    kind = hf.problem_type
    if kind == "regression":
        return Classes(labels, "identity")
    independent = kind == "multi_label_classification" or len(labels) == 1
    return Classes(labels, "sigmoid" if independent else "softmax")


def _score(weights: Weights, config: DecoderConfig) -> Tensor:
    weight, bias = weights.linear("score", len(config.hf.id2label or ()), config.hidden_size)
    if bias is not None:
        raise CheckpointError(f"{weights.source.name}: score.bias is not served")
    return (weight.dequantize() if isinstance(weight, QuantizedWeight) else weight).double()


def _difference(weights: Weights, config: DecoderConfig, tokens: Sequence[str]) -> Tensor:
    """The row of the second of two tokens in the output layer, less that of the first."""
    source = weights.source
    if config.logit_cap:
        raise CheckpointError(f"{source.name} caps its logits; two of them are no score")
    vocabulary = source.tokenizer().get_vocab()
    if len(tokens) != 2 or not all(token in vocabulary for token in tokens):
        raise CheckpointError(f"{source.name} cannot judge by {tokens}: they must be two tokens of its vocabulary")
    rows = torch.tensor([vocabulary[token] for token in tokens])
    tied = config.tie_word_embeddings and not weights.is_quantized(config.modules.head)
    module = config.modules.embedding if tied else config.modules.head
    weight, _ = weights.linear(module, config.vocab_size, config.hidden_size)
    if isinstance(weight, QuantizedWeight):
        zeros = None if weight.zeros is None else weight.zeros[rows]
        found = replace(weight, stored=weight.codes[rows], scales=weight.scales[rows], zeros=zeros).dequantize()
    else:
        found = weight[rows]
    return found.double().diff(dim=0) * config.multipliers.logits
