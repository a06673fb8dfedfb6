"""AMD Quark's checkpoints, in which AMD publishes fp8 and MXFP4 models.

W is [out, in]; the parts of one linear by the ``dtype`` of its weight
    fp8_e4m3     weight e4m3 [out, in], weight_scale [] or [out]
    fp4          weight uint8 [out, in / 2], weight_scale uint8 [out, in / 32]: MXFP4
    int4, uint4  weight int32 [in, out / 8] in AWQ's order of eight, weight_scale [groups, out],
                 weight_zero_point int32 [groups, out / 8], packed as the weight; int4 is signed
    int8         weight int8 [out, in], weight_scale [] or [out]
and ``input_scale`` [] where it is static, and ``bias`` [out] where the linear has one. ``layer_quant_config`` has
patterns of modules with schemes of their own. Inputs in fp4 stay finer here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.awq import ORDER
from qserve.checkpoint.formats.format import bias_from, names_from, one_number, require, scheme_from, spread
from qserve.checkpoint.formats.mxfp4 import read_e2m1, read_e8m0
from qserve.checkpoint.formats.read_only import ReadOnlyFormat
from qserve.checkpoint.grid import E2M1, E4M3
from qserve.checkpoint.packed_codes import PackedCodes
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import MXFP4, ActivationScheme, KVScheme, QuantSpec, WeightScheme

_WHAT = "Quark"
_WEIGHTS = ("fp8_e4m3 per_tensor or per_channel, fp4 per_group of 32, int4 and uint4 per_group, "
            "int8 per_tensor or per_channel")  # fmt: skip
_BYTES = {"fp8_e4m3": "fp8", "int8": "int"}
_Layer = tuple[WeightScheme | None, ActivationScheme | None]


@dataclass(frozen=True)
class Quark(ReadOnlyFormat):
    """A ``Format``."""

    name: str = "quark"
    parts: tuple[str, ...] = (
        "weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point", "bias"
    )
    marks: tuple[str, ...] = ("weight_scale",)
    symmetric_zeros: bool = True

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """The first pattern of ``layer_quant_config`` that names a module counts, else ``global_quant_config``."""
        export = config.get("export")
        export = export if isinstance(export, dict) else {}
        for key, known in (("weight_format", "real_quantized"), ("pack_method", "reorder")):
            if export.get(key, known) != known:
                raise CheckpointError(f"{_WHAT} configuration: {key} {export[key]!r} is not supported")
        if config.get("layer_type_quant_config"):
            raise CheckpointError(f"{_WHAT} configuration: layer_type_quant_config is not supported")
        default = _layer(config.get("global_quant_config"))
        patterns = config.get("layer_quant_config") or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{_WHAT} configuration: layer_quant_config must be an object")
        own = {pattern: _layer(layer) for pattern, layer in patterns.items()}
        excluded = names_from(_WHAT, "exclude", config.get("exclude"))
        found: dict[str, _Layer] = {}
        for module in dict.fromkeys(("lm_head", *modules)):
            if not any(_names(pattern, module) for pattern in excluded):
                found[module] = next((layer for pattern, layer in own.items() if _names(pattern, module)), default)
        packed = {module: (scheme, inputs) for module, (scheme, inputs) in found.items() if scheme is not None}
        kinds = [scheme for scheme in (default[0], *(scheme for scheme, _ in packed.values())) if scheme is not None]
        if not kinds:
            raise CheckpointError(f"{_WHAT} configuration: no weight is quantized")
        rounded = list(dict.fromkeys(inputs for _, inputs in packed.values() if inputs is not None))
        if len(rounded) > 1:
            raise CheckpointError(f"{_WHAT} configuration: inputs are rounded as {rounded[0]} and as {rounded[1]}; "
                                  "one scheme for all is supported")  # fmt: skip
        return QuantSpec(
            "unknown", kinds[0], rounded[0] if rounded else None, _kv_cache(config.get("kv_cache_quant_config")),
            overrides={module: scheme for module, (scheme, _) in packed.items() if scheme != kinds[0]},
            ignored=tuple(module for module in dict.fromkeys(("lm_head", *modules)) if module not in packed),
            float_inputs=tuple(module for module, (_, inputs) in packed.items() if rounded and inputs is None),
        )  # fmt: skip

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        scale, zeros = require(parts, "weight_scale"), None
        codes: Tensor | PackedCodes
        if scheme.grid is E2M1:
            codes, scale = read_e2m1(require(parts, "weight", torch.uint8, 2)), read_e8m0(scale)
        elif scheme.grid is E4M3:
            codes = require(parts, "weight", torch.float8_e4m3fn, 2).view(torch.uint8)
        elif scheme.bits == 4:
            codes, zeros = _nibbles(require(parts, "weight", torch.int32, 2)), None
            scale = scale.t()
            if not scheme.symmetric:
                zeros = _nibbles(require(parts, "weight_zero_point", torch.int32, 2)).unpack()
            else:
                codes = codes.unpack() ^ scheme.zero
        else:
            codes = require(parts, "weight", torch.int8, 2).view(torch.uint8) ^ scheme.zero
        if scheme.symmetric and "weight_zero_point" in parts and bool(parts["weight_zero_point"].any()):
            raise CheckpointError("weight_zero_point is not 0, but the configuration says that weights are symmetric")
        out, inp = codes.shape
        static = activations is not None and not activations.dynamic
        weight = QuantizedWeight(
            scheme, codes, spread(scale, scheme, out, inp), zeros, None, bias_from(parts, out), activations,
            one_number(parts, "input_scale") if static else None,
        )  # fmt: skip
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        first, second = shapes["weight"]
        if scheme.grid is E2M1:
            return first, 2 * second
        return (first, second) if scheme.bits == 8 else (8 * second, first)


def _nibbles(words: Tensor) -> PackedCodes:
    return PackedCodes((words,), 4, len(words), ORDER)


def _names(pattern: str, module: str) -> bool:
    return fnmatchcase(module, pattern.replace("language_model.", ""))


def _layer(said: object) -> _Layer:
    if not isinstance(said, dict):
        raise CheckpointError(f"{_WHAT} configuration: a layer's quantization must be an object, not {said!r}")
    if said.get("output_tensors") or said.get("bias"):
        raise CheckpointError(f"{_WHAT} configuration: rounded outputs and biases are not supported")
    weight, inputs = said.get("weight"), said.get("input_tensors")
    return (None if weight is None else _weights(weight)), (None if inputs is None else _inputs(inputs))


def _weights(said: object) -> WeightScheme:
    if isinstance(said, dict):
        kind, shared, size = (said.get(key) for key in ("dtype", "qscheme", "group_size"))
        if kind in _BYTES and (shared == "per_tensor" or (shared == "per_channel" and said.get("ch_axis") == 0)):
            rows = -1 if shared == "per_tensor" else 1
            return scheme_from(_WHAT, bits=8, group_size=-1, dtype=_BYTES[kind], rows=rows)
        if shared == "per_group" and said.get("ch_axis") in (1, -1):
            if (kind, size, said.get("scale_format")) == ("fp4", 32, "e8m0"):
                return MXFP4
            if kind in ("int4", "uint4"):
                return scheme_from(_WHAT, bits=4, group_size=size, symmetric=kind == "int4")
        said = f"{kind} {shared}"
    raise CheckpointError(f"{_WHAT} configuration: weights of {said} are not supported; supported: {_WEIGHTS}")


def _inputs(said: object) -> ActivationScheme | None:
    if isinstance(said, dict):
        kind, shared, dynamic = said.get("dtype"), said.get("qscheme"), bool(said.get("is_dynamic"))
        if kind == "fp4":
            return None
        if kind in _BYTES and said.get("symmetric", True) is not False:
            name: Any = "fp8" if kind == "fp8_e4m3" else "int8"
            if shared == "per_tensor":
                return ActivationScheme(name, "tensor", dynamic=dynamic)
            if shared == "per_channel" and dynamic:
                return ActivationScheme(name)
        said = f"{kind} {shared}"
    raise CheckpointError(f"{_WHAT} configuration: inputs of {said} are not supported; supported: fp8_e4m3 and int8 "
                          "per_tensor, or per token and dynamic, and fp4")  # fmt: skip


def _kv_cache(said: object) -> KVScheme | None:
    """fp8 with a scale for the tensor, or nothing."""
    if not said:
        return None
    layers = list(said.values()) if isinstance(said, dict) else [said]
    kinds = [layer.get("output_tensors") if isinstance(layer, dict) else None for layer in layers]
    if not all(isinstance(kind, dict) and (kind.get("dtype"), kind.get("qscheme")) == ("fp8_e4m3", "per_tensor")
               for kind in kinds):  # fmt: skip
        raise CheckpointError(f"{_WHAT} configuration: a KV cache must be fp8_e4m3 per_tensor, not {said!r}")
    return KVScheme("fp8")
