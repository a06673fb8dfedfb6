"""Models of random weights in the shapes of published ones: what a decoder asks of one, and nothing is downloaded."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme

TINY = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
W4, FP8 = WeightScheme(4, 128), WeightScheme(8, -1, dtype="fp8")
PRECISIONS: dict[str, tuple[QuantSpec | None, torch.dtype]] = {
    "bf16": (None, torch.float16),
    "w4a16": (QuantSpec("rtn", W4), torch.float16),
    "fp8": (QuantSpec("rtn", FP8, ActivationScheme("fp8")), torch.float16),
    "fp8+fp8kv": (QuantSpec("rtn", FP8, ActivationScheme("fp8")), torch.float8_e4m3fn),
}
"""Weights and inputs, and the KV cache."""


def shape_of(name: str) -> dict[str, Any]:
    """The content of the config.json of a published model, or of a tiny one."""
    if name == "tiny":
        return TINY
    shapes = tomllib.loads((files("qserve.evals.planner") / "data/shapes.toml").read_text())
    return {key: value for key, value in shapes[name].items() if key != "source"}


class RandomModel:
    """Its weights are made on ``device``; those of one shape have one content, each in memory of its own."""

    name = "random"

    def __init__(self, shape: dict[str, Any], spec: QuantSpec | None, device: torch.device) -> None:
        self.config, self.spec, self.device = shape, spec, device
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
        self._shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        self._rest = {"embed_tokens": (shape["vocab_size"], hidden), "lm_head": (shape["vocab_size"], hidden)}

    def linears(self) -> list[str]:
        if self.spec is None:
            return []
        layers = range(self.config["num_hidden_layers"])
        return [f"model.layers.{i}.{module}" for i in layers for module in self._shapes]

    def has(self, name: str) -> bool:
        return name.endswith(".weight") and name != "score.weight"  # which would make it a classifier

    def tensor(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if "norm" in module:
            return torch.ones(self.config["hidden_size"])
        last = ".".join(module.split(".")[-2:])
        return _dense(self._shapes.get(last) or self._rest[module.split(".")[-1]], self.device).clone()

    def linear(self, module: str) -> QuantizedWeight:
        assert self.spec is not None
        shape = self._shapes[".".join(module.split(".")[-2:])]
        return _packed(shape, self.spec.weights, self.spec.activations, self.device)


def forget() -> None:
    """Give back the memory of what was made."""
    _dense.cache_clear()
    _packed.cache_clear()


@cache
def _dense(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
    return (values * 0.02).to(torch.bfloat16)


@cache
def _packed(
    shape: tuple[int, ...], scheme: WeightScheme, activations: ActivationScheme | None, device: torch.device
) -> QuantizedWeight:
    made = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    if scheme.dtype == "fp8":
        codes = (torch.randn(shape, **made) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return QuantizedWeight(scheme, codes, torch.full((shape[0], 1), 2e-4, device=device), activations=activations)
    codes = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8, **made)
    scales = torch.rand(shape[0], scheme.groups(shape[1]), **made) * 0.008 + 0.001
    scales = scales.half().float()  # as the formats have them
    return QuantizedWeight(scheme, codes, scales, activations=activations)
