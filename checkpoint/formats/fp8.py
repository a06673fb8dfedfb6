"""The fp8 format of Hugging Face and vLLM: e4m3 numbers with a scale per tensor or per block.

W is [out, in]; the parts of one linear are
    weight            e4m3 [out, in]
    weight_scale      float32 [1]                            one for the tensor, or
    weight_scale_inv  float32 [ceil(out/r), ceil(in/c)]      one per block of r x c; a multiplier, despite its name
    input_scale       float32 [1]                            only where ``activation_scheme`` is static
    bias              [out]                                  only where the linear has one
All linears share one scheme. Blocks go with inputs rounded in groups of c, scales per tensor with inputs rounded per
token or with their static scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats.format import (
    Schemes,
    Shapes,
    bias_from,
    is_embedding,
    meta_of,
    method_of,
    names_from,
    narrowest,
    one_number,
    require,
    scheme_from,
    spread,
)
from qserve.checkpoint.grid import E4M3
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme


@dataclass(frozen=True)
class FP8:
    """A ``Format``."""

    name: str = "fp8"
    parts: tuple[str, ...] = (
        "weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "bias"
    )
    marks: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
    symmetric_zeros: bool = False

    def limit(self, spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
        if reason := _unsayable(spec):
            return reason
        for module, scheme in schemes.items():
            if scheme != spec.weights:
                return f"{module}: the fp8 format has one scheme for all linears, {spec.weights}, not {scheme}"
            if is_embedding(module):
                return f"{module}: the fp8 format holds no embeddings"
        return None

    def config_of(self, spec: QuantSpec) -> dict[str, Any]:
        if reason := _unsayable(spec):
            raise UsageError(f"{reason}; choose another --format")
        assert spec.activations is not None
        kept = list(spec.ignored)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic" if spec.activations.dynamic else "static",
            "weight_block_size": None if spec.weights.rows == -1 else [spec.weights.rows, spec.weights.group_size],
            # transformers reads the first, vLLM the second.
            "modules_to_not_convert": kept,
            "ignored_layers": kept,
            "meta": meta_of(spec),
        }

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """A module stays in floating point where its name, its parent's name or the end of its name is listed."""
        for key, known in (("fmt", (None, "e4m3")), ("scale_fmt", (None, "float"))):
            if config.get(key) not in known:
                raise CheckpointError(f"fp8 configuration: {key} {config[key]!r} is not supported")
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise CheckpointError(f"fp8 configuration: activation_scheme {scheme!r} is not supported")
        block = config.get("weight_block_size")
        if block is None:
            weights = WeightScheme(8, -1, dtype="fp8", rows=-1)
            activations = (ActivationScheme("fp8", "token") if scheme == "dynamic"
                           else ActivationScheme("fp8", "tensor", dynamic=False))
        else:
            if not isinstance(block, list) or len(block) != 2 or scheme == "static":
                raise CheckpointError(f"fp8 configuration: weight_block_size {block!r} with {scheme} inputs is not "
                                      "supported; blocks are two sizes, with dynamic inputs")
            weights = scheme_from("fp8", bits=8, dtype="fp8", rows=block[0], group_size=block[1])
            activations = ActivationScheme("fp8", "group", group_size=weights.group_size)
        kept = [name for key in ("modules_to_not_convert", "ignored_layers")
                for name in names_from("fp8", key, config.get(key))]
        ignored = [
            module for module in dict.fromkeys(("lm_head", *modules))
            if any(f".{module}".endswith(f".{name}") or module.startswith(f"{name}.") for name in kept)
            or (module == "lm_head" and not kept)
        ]
        return QuantSpec(method=method_of(config, "unknown"), weights=weights, activations=activations,
                         ignored=tuple(ignored))

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        scheme = weight.scheme
        if reason := _unsayable_weight(scheme, weight.activations):
            raise CheckpointError(reason)
        if weight.g_idx is not None:
            raise CheckpointError("the fp8 format holds no groups out of the order of the input")
        scales = weight.block_scales()
        parts = {"weight": weight.codes.view(torch.float8_e4m3fn)}
        parts |= {"weight_scale": scales.reshape(1)} if scheme.rows == -1 else {"weight_scale_inv": scales}
        if weight.input_scale is not None:
            parts["input_scale"] = torch.tensor([weight.input_scale], dtype=torch.float32)
        if weight.bias is not None:
            parts["bias"] = narrowest(weight.bias)
        return parts

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        """Also reads the names that transformers gives scales per tensor."""
        codes = require(parts, "weight", torch.float8_e4m3fn, 2).view(torch.uint8)
        out, inp = codes.shape
        scale = require(parts, "weight_scale" if "weight_scale" in parts else "weight_scale_inv")
        static = activations is not None and not activations.dynamic
        weight = QuantizedWeight(
            scheme,
            codes,
            spread(scale, scheme, out, inp),
            bias=bias_from(parts, out),
            activations=activations,
            input_scale=one_number(parts, "input_scale" if "input_scale" in parts else "activation_scale")
            if static else None,
        )
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        out, inp = shapes["weight"]
        return out, inp


def _unsayable_weight(scheme: WeightScheme, activations: ActivationScheme | None) -> str | None:
    per_tensor = (scheme.group_size, scheme.rows) == (-1, -1)
    block = scheme.group_size != -1 and scheme.rows not in (1, -1)
    if scheme.grid is not E4M3 or not (per_tensor or block):
        return f"the fp8 format holds e4m3 weights with scales per tensor or per block, not {scheme}"
    if activations is None or activations.grid is not E4M3:
        return f"the fp8 format rounds inputs to fp8, not {activations or 'at all'}"
    if block and (activations.granularity, activations.group_size) != ("group", scheme.group_size):
        return f"the fp8 format rounds inputs in groups of {scheme.group_size} where weights have blocks"
    if per_tensor and activations.granularity == "group":
        return "the fp8 format rounds inputs in groups only where weights have blocks"
    if per_tensor and activations.granularity == "tensor" and activations.dynamic:
        return "the fp8 format rounds inputs per token where their scale is dynamic"
    return None


def _unsayable(spec: QuantSpec) -> str | None:
    if spec.kv_cache is not None:
        return "the fp8 format has no words for a quantized KV cache"
    if spec.act_order or spec.float_inputs:
        return "the fp8 format rounds the inputs of all linears, in their order"
    if any(scheme != spec.weights for scheme in spec.overrides.values()):
        return f"the fp8 format has one scheme for all linears, {spec.weights}"
    return _unsayable_weight(spec.weights, spec.activations)
