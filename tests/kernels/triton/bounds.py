"""What a model needs of a machine: bytes of memory, and the least seconds of a step."""

from __future__ import annotations

import torch

from qserve.checkpoint.spec import QuantSpec
from qserve.evals.bench.roofline import Roof
from qserve.runtime.models.config import DecoderConfig


def _linears(config: DecoderConfig) -> int:
    sizes = 2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size
    return config.num_hidden_layers * config.hidden_size * sizes


def _linear_bytes(config: DecoderConfig, spec: QuantSpec | None) -> float:
    hidden, inner = config.hidden_size, config.intermediate_size
    bits = 16.0 if spec is None else spec.weights.storage_bits(hidden, inner) / (hidden * inner)
    return _linears(config) * bits / 8


def weight_bytes(config: DecoderConfig, spec: QuantSpec | None) -> float:
    """Of all weights; the embeddings and the head are two tables of 16 bits."""
    return _linear_bytes(config, spec) + 2 * 2 * config.hidden_size * config.vocab_size


def floor(
    config: DecoderConfig, spec: QuantSpec | None, kv_bytes: int, sequences: int, tokens: int, context: int, roof: Roof
) -> float:
    """Seconds of a step of so many ``tokens`` of all ``sequences``, each of which has ``context`` in the end: every
    weight and every key once, every product once. Products of 8 bits have twice the rate of those of 16."""
    head = config.hidden_size * config.vocab_size
    moved = _linear_bytes(config, spec) + head * 2 + sequences * context * config.kv_bytes_per_token(kv_bytes)
    seen = context if tokens == sequences else context / 2
    scores = 4 * config.num_hidden_layers * config.q_size * tokens * seen
    assert roof.operations is not None
    rate = roof.operations * (2 if spec is not None and spec.activations is not None else 1)
    products = (2 * _linears(config) * tokens + 2 * head * sequences) / rate + scores / roof.operations
    return max(moved / roof.bytes, products)


def lacking(device: torch.device, needed: float) -> str | None:
    """None, or that so many bytes are not free on a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # what is set aside but unused is free
    free = torch.cuda.mem_get_info(device)[0]
    return None if needed < free else f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
