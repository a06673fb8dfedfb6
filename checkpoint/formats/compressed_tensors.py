"""The compressed-tensors format, as llm-compressor and vLLM write and read it.

This file has the layouts of one module; the configuration is in ``compressed_tensors_config``.

W is [out, in], b the bits, s = 2 ** (b - 1); every part is stored row by row
    weight_packed      int32 [out, ceil(in * b / 32)]   codes along the input, unsigned  (pack-quantized)
    weight_shape       int64 [2]                        out, in                          (pack-quantized)
    weight_packed      uint8 [out, in / 2]              e2m1, the first in the low bits (mxfp4-, nvfp4-pack-quantized)
    weight_packed      uint8 [tiles, in, 2 * b]         streams of symbols, see ``trellis``           (trellis)
    weight_shape       int64 [2]                        out, in                                      (trellis)
    weight             int8 [out, in]                   code - s                         (int-quantized)
    weight             e4m3 [out, in]                   the numbers     (float-, naive-, mxfp8-quantized)
    weight_scale       [out, groups], [out, 1], [1], or one per block of outputs and inputs; uint8 is e8m0 (mxfp4 and 8)
    weight_scale       e4m3 [out, in / 16]              times the next one               (nvfp4-pack-quantized)
    weight_global_scale  f32 [1]                        divides the scales               (nvfp4-pack-quantized)
    input_global_scale   f32 [1]                        divides the scales of inputs in four bits
    weight_zero_point  int32 [ceil(out * b / 32), groups], packed along the output (pack-quantized), or
                       int8 [out, groups], zero point - s; only where the weight is asymmetric
    weight_g_idx       int32 [in]                       the group of each input feature, in files of older writers
    input_scale        [1]                              only where the scale of the input is static
    bias               [out]                            only where the linear has one
Scales and bias have the narrowest of float16, bfloat16 and float32 that holds them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import compressed_tensors_config as configuration
from qserve.checkpoint.formats.format import (
    Schemes,
    Shapes,
    bias_from,
    is_embedding,
    narrowest,
    one_number,
    require,
    spread,
)
from qserve.checkpoint.formats.mxfp4 import read_e2m1, read_e8m0, write_e2m1, write_e8m0
from qserve.checkpoint.grid import E2M1, E4M3, INTEGERS, TRELLIS
from qserve.checkpoint.packed_codes import Packed, PackedCodes
from qserve.checkpoint.quantized_weight import QuantizedWeight, in_order
from qserve.checkpoint.spec import MXFP4, MXFP8, ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.trellis import LANES, RING, PackedTrellis
from qserve.checkpoint.words import pack_words, unpack_words, words_for

_GLOBAL, _INPUT_GLOBAL = "weight_global_scale", "input_global_scale"


@dataclass(frozen=True)
class CompressedTensors:
    """A ``Format``."""

    name: str = "compressed-tensors"
    parts: tuple[str, ...] = (
        "weight_scale", "weight_packed", "weight", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
        "bias", "weight_global_scale", "input_global_scale",
    )
    marks: tuple[str, ...] = ("weight_scale",)
    symmetric_zeros: bool = False

    def limit(self, spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
        if spec.act_order:
            return "compressed-tensors gave up groups out of the order of the input; write them as gptq"
        for module, scheme in schemes.items():
            out, inp = shapes[module]
            if reason := configuration.unsayable(scheme, spec.activations_of(module)):
                return f"{module}: {reason}"
            if inp % scheme.group_width(inp):
                return f"{module} [{out}, {inp}]: groups of {scheme.group_size} do not divide its input"
            if is_embedding(module) and spec.activations_of(module) is not None:
                return f"{module}: the input of an embedding is a token, not something to round"
        return None

    def config_of(self, spec: QuantSpec) -> dict[str, Any]:
        if spec.act_order:
            raise UsageError(str(self.limit(spec, {}, {})))
        return configuration.config_of(spec)

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        return configuration.spec_of(config, modules)

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        scheme, (out, inp) = weight.scheme, weight.stored.shape
        if reason := configuration.unsayable(scheme, weight.activations):
            raise CheckpointError(reason)
        if weight.g_idx is not None:
            raise CheckpointError("compressed-tensors holds no groups out of the order of the input; write gptq")
        if inp % scheme.group_width(inp):
            raise CheckpointError(f"groups of {scheme.group_size} do not divide an input of {inp}")
        layout = configuration.layout(scheme, weight.activations)
        scales = weight.block_scales()
        parts: dict[str, Tensor] = {}
        if layout == "pack-quantized":
            parts["weight_packed"] = pack_words(weight.codes, scheme.bits)
            parts["weight_shape"] = torch.tensor([out, inp], dtype=torch.int64)
            if weight.zeros is not None:
                parts["weight_zero_point"] = pack_words(weight.zeros.t(), scheme.bits).t().contiguous()
        elif layout == "int-quantized":
            parts["weight"] = _signed(weight.codes, scheme)
            if weight.zeros is not None:
                parts["weight_zero_point"] = _signed(weight.zeros, scheme)
        elif scheme.grid is E2M1:
            parts["weight_packed"] = write_e2m1(weight.codes)
        elif layout == "trellis":
            if not isinstance(weight.stored, PackedTrellis) or weight.stored.tiles is not None:
                raise CheckpointError("the streams of these trellis codes are not known")
            parts["weight_packed"] = weight.stored.streams
            parts["weight_shape"] = torch.tensor([out, inp], dtype=torch.int64)
        else:
            parts["weight"] = weight.codes.view(torch.float8_e4m3fn)
        scales = scales.reshape(-1) if scheme.rows == -1 else scales
        if layout == "nvfp4-pack-quantized":
            parts["weight_scale"], parts["weight_global_scale"] = _write_e4m3(scales, weight.global_scale)
        else:
            parts["weight_scale"] = write_e8m0(scales) if scheme in (MXFP4, MXFP8) else narrowest(scales)
        if weight.input_scale is not None and weight.activations is not None:
            fp4 = weight.activations.grid is E2M1
            value = 1 / weight.input_scale if fp4 else weight.input_scale
            parts[_INPUT_GLOBAL if fp4 else "input_scale"] = torch.tensor([value], dtype=torch.float32)
        if weight.bias is not None:
            parts["bias"] = narrowest(weight.bias)
        return parts

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        """The parts that exist decide the layout, not its name in the configuration."""
        codes: Tensor | Packed
        if scheme.grid is TRELLIS:
            codes, zeros = _streams(parts, scheme), None
        elif scheme.grid is E2M1:
            codes, zeros = read_e2m1(require(parts, "weight_packed", torch.uint8, 2)), None
        elif "weight_packed" in parts:
            codes, zeros = _packed(parts, scheme)
        else:
            codes, zeros = _read(parts, scheme)
        out, inp = codes.shape
        weight = QuantizedWeight(
            scheme,
            codes,
            spread(_scale(parts), scheme, out, inp),
            zeros,
            require(parts, "weight_g_idx", dim=1).to(torch.int32) if "weight_g_idx" in parts else None,
            bias_from(parts, out),
            activations,
            _input_scale(parts, activations),
            one_number(parts, _GLOBAL) if _GLOBAL in parts else None,
        )
        weight.check()
        return in_order(weight)

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        if "weight_packed" not in shapes:
            out, inp = shapes["weight"]
            return out, inp
        if scheme.grid is TRELLIS:
            return _size(read("weight_shape"))
        if "weight_shape" in shapes:
            return _stored_shape(read("weight_shape"), shapes["weight_packed"])
        out, words = shapes["weight_packed"]
        return out, words * (8 if scheme.grid is E2M1 else 32) // scheme.bits


def _scale(parts: Mapping[str, Tensor]) -> Tensor:
    scale = require(parts, "weight_scale")
    if scale.dtype == torch.uint8:
        return read_e8m0(scale)
    return scale.float() / one_number(parts, _GLOBAL) if _GLOBAL in parts else scale


def _input_scale(parts: Mapping[str, Tensor], activations: ActivationScheme | None) -> float | None:
    if activations is None or activations.dynamic:
        return None
    if activations.grid is not E2M1:
        return one_number(parts, "input_scale")
    if not (divisor := one_number(parts, _INPUT_GLOBAL)) > 0:
        raise CheckpointError(f"{_INPUT_GLOBAL} is {divisor}, it must be positive")
    return 1 / divisor


def _write_e4m3(scales: Tensor, shared: float | None) -> tuple[Tensor, Tensor]:
    """The parts of NVFP4's scales; raises ``CheckpointError`` where no number is known that makes them e4m3 numbers."""
    if shared is None:
        raise CheckpointError("NVFP4 is written where the global scale of a weight is known")
    number, written = (scales * shared).to(torch.float8_e4m3fn), torch.tensor([shared], dtype=torch.float32)
    if not torch.equal(number.float() / written, scales):
        raise CheckpointError("a scale is no e4m3 number over the global scale, which NVFP4 needs")
    return number, written


def _packed(parts: Mapping[str, Tensor], scheme: WeightScheme) -> tuple[PackedCodes, Tensor | None]:
    """(codes, zeros) of pack-quantized parts."""
    packed = require(parts, "weight_packed", torch.int32, 2)
    if scheme.grid is not INTEGERS:
        raise CheckpointError(f"weight_packed holds integers, but the configuration says {scheme}")
    out, inp = _stored_shape(require(parts, "weight_shape"), tuple(packed.shape))
    if packed.shape[1] != words_for(inp, scheme.bits):
        raise CheckpointError(
            f"weight_packed is {list(packed.shape)}, expected {[out, words_for(inp, scheme.bits)]} for {inp} values of "
            f"{scheme.bits} bits in a row"
        )
    codes = PackedCodes((packed,), scheme.bits, inp)
    if scheme.symmetric:
        return codes, None
    stored, groups = require(parts, "weight_zero_point", torch.int32, 2), scheme.groups(inp)
    if tuple(stored.shape) != (words_for(out, scheme.bits), groups):
        raise CheckpointError(
            f"weight_zero_point is {list(stored.shape)}, expected {[words_for(out, scheme.bits), groups]}"
        )
    return codes, unpack_words(stored.t(), scheme.bits, out).t().contiguous()


def _streams(parts: Mapping[str, Tensor], scheme: WeightScheme) -> PackedTrellis:
    streams = require(parts, "weight_packed", torch.uint8, 3)
    out, inp = _size(require(parts, "weight_shape"))
    if list(streams.shape) != (expected := [-(-out // RING) * RING // LANES, inp, 2 * scheme.bits]):
        raise CheckpointError(f"weight_packed is {list(streams.shape)}, expected {expected} for {[out, inp]}")
    return PackedTrellis(streams, scheme.bits, out)


def _read(parts: Mapping[str, Tensor], scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """(codes, zeros) of a weight stored one value a byte."""
    if reason := configuration.unsayable(scheme, None):
        raise CheckpointError(reason)
    if scheme.grid is E4M3:
        return require(parts, "weight", torch.float8_e4m3fn, 2).view(torch.uint8), None
    codes = _unsigned(require(parts, "weight", torch.int8, 2), scheme)
    if scheme.symmetric:
        return codes, None
    return codes, _unsigned(require(parts, "weight_zero_point", torch.int8, 2), scheme)


def _stored_shape(stored: Tensor, packed: tuple[int, ...]) -> tuple[int, int]:
    out, inp = _size(stored)
    if out != packed[0]:
        raise CheckpointError(f"weight_shape says {[out, inp]}, but weight_packed is {list(packed)}")
    return out, inp


def _size(stored: Tensor) -> tuple[int, int]:
    shape = stored.reshape(-1).tolist()
    if stored.is_floating_point() or len(shape) != 2 or min(shape) < 1:
        raise CheckpointError(f"weight_shape says {shape}, expected two sizes")
    return shape[0], shape[1]


def _signed(codes: Tensor, scheme: WeightScheme) -> Tensor:
    return (codes.to(torch.int16) - scheme.zero).to(torch.int8)


def _unsigned(values: Tensor, scheme: WeightScheme) -> Tensor:
    codes = values.to(torch.int16) + scheme.zero
    if int(codes.min()) < 0 or int(codes.max()) > scheme.max_code:
        raise CheckpointError(f"a value does not fit the {scheme.bits} bits of the configuration")
    return codes.to(torch.uint8)
