"""The AWQ format in its "gemm" version: 4-bit codes of eight neighbouring outputs in a word, interleaved.

W is [out, in]; the parts of one linear are
    qweight  int32 [in, out / 8]       nibble i of word c is the code of output 8c + ORDER[i]
    qzeros   int32 [groups, out / 8]   zero points in the same order
    scales   float16 [groups, out]
    bias     float16 [out]             only where the linear has one
One group size holds for all linears; every weight has zero points (a symmetric one has 8 everywhere).
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
    half,
    is_embedding,
    meta_of,
    method_of,
    names_from,
    require,
    scheme_from,
)
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.packed_codes import PackedCodes
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.words import pack_words

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AWQ:
    """A ``Format``."""

    name: str = "awq"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "bias")
    marks: tuple[str, ...] = ("qweight",)
    symmetric_zeros: bool = True

    def limit(self, spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
        if spec.activations is not None or spec.kv_cache is not None:
            return "the AWQ format quantizes weights only"
        if spec.act_order:
            return "the AWQ format holds no groups out of the order of the input"
        for module, scheme in schemes.items():
            out, inp = shapes[module]
            if reason := _unsayable(scheme):
                return f"{module}: {reason}"
            if is_embedding(module) or module == "lm_head":
                return f"{module}: the AWQ format holds neither embeddings nor the output layer"
            if scheme.group_size != spec.weights.group_size:
                return f"{module}: the AWQ format has one group size for all, and this one has {scheme.group_size}"
            if out % 8 or inp % scheme.group_width(inp):
                return (f"{module} [{out}, {inp}]: outputs must be a multiple of 8, "
                        f"and groups of {scheme.group_size} must divide the input")
        return None

    def config_of(self, spec: QuantSpec) -> dict[str, Any]:
        schemes = {spec.weights, *spec.overrides.values()}
        for scheme in schemes:
            if reason := _unsayable(scheme):
                raise UsageError(reason)
        if spec.activations is not None or spec.kv_cache is not None or spec.act_order:
            raise UsageError("the AWQ format quantizes weights only, in groups in the order of the input")
        if len({scheme.group_size for scheme in schemes}) > 1 or "lm_head" not in spec.ignored:
            raise UsageError("the AWQ format has one group size for all linears and holds no output layer")
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": spec.weights.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [module for module in spec.ignored if module != "lm_head"] or None,
            "meta": meta_of(spec),
        }

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """``modules_to_not_convert`` names parts of module names."""
        version = str(config.get("version") or "gemm").lower()
        if version != "gemm":
            raise CheckpointError(f"AWQ version {version!r} is not supported; supported: gemm")
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise CheckpointError(f"AWQ configuration: bits must be 4, not {bits!r}")
        weights = scheme_from("AWQ", bits=4, group_size=config.get("group_size", config.get("q_group_size", 128)),
                              symmetric=False)
        if config.get("zero_point", True) is not True:
            raise CheckpointError("AWQ configuration: weights without zero points are not supported")
        skipped = names_from("AWQ", "modules_to_not_convert", config.get("modules_to_not_convert"))
        ignored = [module for module in dict.fromkeys(modules)
                   if module != "lm_head" and any(part in module for part in skipped)]
        return QuantSpec(method=method_of(config, "awq"), weights=weights, ignored=("lm_head", *ignored))

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Scales and bias are rounded to float16. ``CheckpointError`` where the format cannot hold the weight."""
        scheme = weight.scheme
        out, inp = weight.codes.shape
        if reason := _unsayable(scheme):
            raise CheckpointError(reason)
        if weight.activations is not None or weight.g_idx is not None:
            raise CheckpointError("the AWQ format holds neither rounded inputs nor groups out of order")
        if out % 8 or inp % scheme.group_width(inp):
            raise CheckpointError(f"[{out}, {inp}] does not fit words of 8 outputs and groups of {scheme.group_size}")
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full(weight.scales.shape, scheme.zero, dtype=torch.uint8)
        parts = {
            "qweight": _pack(weight.codes),
            "qzeros": _pack(zeros),
            "scales": half(weight.scales, "a scale").t().contiguous(),
        }
        if weight.bias is not None:
            parts["bias"] = half(weight.bias, "a bias")
        return parts

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        qweight, qzeros = (require(parts, part, torch.int32, 2) for part in ("qweight", "qzeros"))
        codes = PackedCodes((qweight,), 4, len(qweight), ORDER)
        zeros = PackedCodes((qzeros,), 4, len(qzeros), ORDER).unpack()
        scales = require(parts, "scales", dim=2).t().contiguous().to(torch.float32)
        weight = QuantizedWeight(scheme, codes, scales, zeros, None, bias_from(parts, codes.outputs), activations)
        weight.check()
        return weight

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        inp, words = shapes["qweight"]
        return words * 8, inp


def _unsayable(scheme: WeightScheme) -> str | None:
    if scheme.grid is not INTEGERS or scheme.bits != 4 or scheme.rows != 1:
        return f"the AWQ format holds 4-bit integers with scales of their own for every output, not {scheme}"
    return None


def _pack(values: Tensor) -> Tensor:
    """uint8 [out, n] -> int32 [n, out / 8]."""
    columns = values.t()
    return pack_words(columns.reshape(len(columns), -1, 8)[..., list(ORDER)].reshape(columns.shape), 4)
