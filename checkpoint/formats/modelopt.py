"""NVIDIA ModelOpt's checkpoints ("unified Hugging Face"), in which NVIDIA publishes fp8 and NVFP4 models.

W is [out, in]; the parts of one linear by its ``quant_algo``, blocks of b as the configuration says
    FP8                        weight e4m3 [out, in], weight_scale [], input_scale []
    FP8_PER_CHANNEL_PER_TOKEN  weight e4m3 [out, in], weight_scale [out]
    FP8_PB_WO                  weight e4m3 [out, in], weight_scale [out / b, 1, in / b, 1]
    NVFP4, W4A16_NVFP4         weight uint8 [out, in / 2]   e2m1 codes of neighbouring inputs, the first in the low bits
                               weight_scale e4m3 [out, in / 16], weight_scale_2 float32 []: a scale is their product
    W4A16_AWQ                  weight uint8 [out / 2, in]   signed codes of neighbouring outputs, the first in the low
                               weight_scale [out, in / b]   bits
    W8A16                      weight int8 [out, in], weight_scale [out]
and ``bias`` [out] where the linear has one. The configuration is the ``quantization`` of hf_quant_config.json, and
what the ``quantization_config`` of config.json says in its place. MIXED_PRECISION lists every linear; inputs in four
bits stay finer there beside those in eight. NVFP4 has an ``input_scale`` [], which multiplies the scales of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import read_json_object
from qserve.checkpoint.formats.format import bias_from, names_from, one_number, require, scheme_from, spread
from qserve.checkpoint.formats.mxfp4 import read_e2m1
from qserve.checkpoint.formats.read_only import ReadOnlyFormat
from qserve.checkpoint.grid import E2M1, E4M3
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import NVFP4_INPUTS, ActivationScheme, KVScheme, QuantSpec, WeightScheme

_WHAT = "ModelOpt"
_MIXED = "MIXED_PRECISION"
_STATIC, _TOKEN = ActivationScheme("fp8", "tensor", dynamic=False), ActivationScheme("fp8")
# The scheme of a weight for its block size, the block size where none is given, and how inputs are rounded.
_ALGORITHMS: dict[str, tuple[Callable[[int], dict[str, Any]], int, ActivationScheme | None]] = {
    "FP8": (lambda _: {"bits": 8, "group_size": -1, "dtype": "fp8", "rows": -1}, -1, _STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": (lambda _: {"bits": 8, "group_size": -1, "dtype": "fp8"}, -1, _TOKEN),
    "FP8_PB_WO": (lambda size: {"bits": 8, "group_size": size, "dtype": "fp8", "rows": size}, 128, None),
    "NVFP4": (lambda size: {"bits": 4, "group_size": size, "dtype": "fp4"}, 16, NVFP4_INPUTS),
    "W4A16_NVFP4": (lambda size: {"bits": 4, "group_size": size, "dtype": "fp4"}, 16, None),
    "W4A16_AWQ": (lambda size: {"bits": 4, "group_size": size}, 128, None),
    "W8A16": (lambda _: {"bits": 8, "group_size": -1}, -1, None),
}
_KV = {"FP8": KVScheme("fp8"), "INT8": KVScheme("int8")}


def with_stored(config: Any, directory: Path) -> Any:
    """``config``, the ``quantization_config`` of config.json or None, with what hf_quant_config.json says beside it."""
    path, method = directory / "hf_quant_config.json", {} if config is None else config
    if not path.exists() or not isinstance(method, dict) or method.get("quant_method", ModelOpt.name) != ModelOpt.name:
        return config
    stored = read_json_object(path).get("quantization")
    return {"quant_method": ModelOpt.name, **(stored if isinstance(stored, dict) else {}), **(config or {})}


@dataclass(frozen=True)
class ModelOpt(ReadOnlyFormat):
    """A ``Format``."""

    name: str = "modelopt"
    parts: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "bias")
    marks: tuple[str, ...] = ("weight_scale",)
    symmetric_zeros: bool = False

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """A module stays in floating point where a pattern of ``ignore`` or ``exclude_modules`` has it, or a parent."""
        modules = list(dict.fromkeys(("lm_head", *modules)))
        kv_cache = _kv_cache(config)
        if config.get("quant_algo") != _MIXED:
            weights, inputs = _scheme(config)
            listed = config.get("ignore", config.get("exclude_modules"))
            excluded = names_from(_WHAT, "ignore", listed)
            ignored = tuple(module for module in modules if any(_names(name, module) for name in excluded))
            return QuantSpec("unknown", weights, inputs, kv_cache, ignored=ignored)
        layers = config.get("quantized_layers")
        if not isinstance(layers, dict) or not layers or not all(isinstance(each, dict) for each in layers.values()):
            raise CheckpointError(f"{_WHAT} configuration: {_MIXED} needs quantized_layers, an object for each linear")
        found = {_plain(name): _scheme(each) for name, each in layers.items()}
        weights = next(iter(found.values()))[0]
        rounded = list(dict.fromkeys(inputs for _, inputs in found.values() if inputs is not None))
        if len(rounded) > 1 and NVFP4_INPUTS in rounded:
            rounded.remove(NVFP4_INPUTS)
            found = {name: (scheme, None if inputs == NVFP4_INPUTS else inputs)
                     for name, (scheme, inputs) in found.items()}  # fmt: skip
        if len(rounded) > 1:
            raise CheckpointError(f"{_WHAT} configuration: inputs are rounded as {rounded[0]} and as {rounded[1]}; "
                                  "one scheme for all is supported")  # fmt: skip
        return QuantSpec(
            "unknown", weights, rounded[0] if rounded else None, kv_cache,
            overrides={module: scheme for module, (scheme, _) in found.items() if scheme != weights},
            ignored=tuple(module for module in modules if module not in found),
            float_inputs=tuple(module for module, (_, inputs) in found.items() if rounded and inputs is None),
        )  # fmt: skip

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        if "pre_quant_scale" in parts:
            raise CheckpointError("pre_quant_scale (inputs that are scaled before the product) is not supported; "
                                  "quantize the original model")  # fmt: skip
        scale = require(parts, "weight_scale")
        if scheme.grid is E2M1:
            codes = read_e2m1(require(parts, "weight", torch.uint8, 2))
            scale = scale.float() * one_number(parts, "weight_scale_2")
        elif scheme.grid is E4M3:
            codes = require(parts, "weight", torch.float8_e4m3fn, 2).view(torch.uint8)
        elif scheme.bits == 4:
            pairs = require(parts, "weight", torch.uint8, 2)
            codes = torch.stack((pairs & 15, pairs >> 4), dim=1).flatten(0, 1) ^ scheme.zero
        else:
            codes = require(parts, "weight", torch.int8, 2).view(torch.uint8) ^ scheme.zero
        out, inp = codes.shape
        static = activations is not None and not activations.dynamic
        weight = QuantizedWeight(
            scheme,
            codes.contiguous(),
            spread(scale, scheme, out, inp),
            bias=bias_from(parts, out),
            activations=activations,
            input_scale=one_number(parts, "input_scale") if static else None,
        )
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        out, inp = shapes["weight"]
        if scheme.grid is E2M1:
            return out, 2 * inp
        return (2 * out, inp) if scheme.bits == 4 else (out, inp)


def _scheme(said: Mapping[str, Any]) -> tuple[WeightScheme, ActivationScheme | None]:
    name = said.get("quant_algo")
    algorithm = _ALGORITHMS.get(str(name).upper())
    if algorithm is None:
        raise CheckpointError(f"{_WHAT} quant_algo {name!r} is not supported; supported: {', '.join(_ALGORITHMS)}, "
                              f"and {_MIXED} of these")  # fmt: skip
    fields, size, inputs = algorithm
    blocks: Any = said.get("group_size") or _group_size(said) or size
    return scheme_from(_WHAT, **fields(blocks)), inputs


def _group_size(said: Mapping[str, Any]) -> object:
    """That of ``config_groups``, which repeats in compressed-tensors' words what the algorithm's name says."""
    try:
        (group,) = said["config_groups"].values()
        return group["weights"]["group_size"]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _kv_cache(said: Mapping[str, Any]) -> KVScheme | None:
    """A cache in four bits is not made: keys and values stay finer."""
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        return _KV["FP8" if scheme.get("type") == "float" else "INT8"]
    return _KV.get(str(said.get("kv_cache_quant_algo") or scheme).upper())


def _plain(name: str) -> str:
    """A module's name without the part that models with a vision tower add."""
    return name.replace("language_model.", "")


def _names(pattern: str, module: str) -> bool:
    pattern = _plain(pattern)
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
