"""The GPTQ format: codes in 32-bit words, fp16 scales, zero points, and its configuration in JSON.

W is [out, in], b the bits (2, 3, 4 or 8); the parts of one linear are
    qweight  int32 [in * b / 32, out]       codes along the input, the first in the lowest bits
    qzeros   int32 [groups, out * b / 32]   zero points along the output, in natural order
    scales   float16 [groups, out]
    g_idx    int32 [in]                     the group of each input feature
    bias     float16 [out]                  only where the linear has one
Version ``gptq`` stores zero point minus one, ``gptq_v2`` the zero point itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats.format import (
    FUSED,
    Schemes,
    Shapes,
    bias_from,
    half,
    is_embedding,
    meta_of,
    method_of,
    pattern_from,
    require,
    scheme_from,
)
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.packed_codes import PackedCodes
from qserve.checkpoint.quantized_weight import QuantizedWeight, in_order
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.checkpoint.words import pack_words, period, unpack_words

BITS = (2, 3, 4, 8)
_SAYS_TOO_LITTLE = "the GPTQ format quantizes weights to integers only; choose another --format"


@dataclass(frozen=True)
class GPTQ:
    """A ``Format``; ``name`` is its version."""

    name: Literal["gptq", "gptq_v2"] = "gptq"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx", "bias")
    marks: tuple[str, ...] = ("qweight",)
    symmetric_zeros: bool = True

    def limit(self, spec: QuantSpec, schemes: Schemes, shapes: Shapes) -> str | None:
        if spec.activations is not None or spec.kv_cache is not None:
            return "the GPTQ format quantizes weights only"
        for module, scheme in schemes.items():
            out, inp = shapes[module]
            if scheme.grid is not INTEGERS or scheme.bits not in BITS:
                return f"{module}: the GPTQ format holds integers of 2, 3, 4 or 8 bits, not {scheme}"
            if scheme.rows != 1:
                return f"{module}: the GPTQ format has scales of its own for every output, not {scheme}"
            if is_embedding(module):
                return f"{module}: the GPTQ format holds no embeddings"
            unit = period(scheme.bits)[0]
            if inp % unit or out % unit:
                return f"{module} [{out}, {inp}]: at {scheme.bits} bits both sizes must be multiples of {unit}"
            if self.name == "gptq" and not scheme.symmetric:
                return f"{module}: version 1 cannot store every zero point of an asymmetric weight; write gptq_v2"
        return None

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Scales and bias are rounded to float16. ``CheckpointError`` for sizes that do not fill words, a scale beyond
        float16, or a zero point of 0 in version ``gptq`` (minus one borrows from its neighbour)."""
        scheme = weight.scheme
        if scheme.grid is not INTEGERS or scheme.bits not in BITS or scheme.rows != 1 or weight.activations is not None:
            raise CheckpointError(f"the GPTQ format cannot hold {scheme}, inputs {weight.activations or 'not rounded'}")
        unit = period(scheme.bits)[0]
        for size in weight.codes.shape:
            if size % unit:
                raise CheckpointError(f"{size} values of {scheme.bits} bits do not fill 32-bit words (of {unit} each)")
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full(weight.scales.shape, scheme.zero, dtype=torch.uint8)
        if self.name == "gptq":
            if bool((zeros == 0).any()):
                raise CheckpointError("GPTQ version 1 cannot store a zero point of 0; write gptq_v2")
            zeros = zeros - 1
        parts = {
            "qweight": pack_words(weight.codes, scheme.bits).t().contiguous(),
            "qzeros": pack_words(zeros.t(), scheme.bits),
            "scales": half(weight.scales, "a scale").t().contiguous(),
            "g_idx": weight.group_of_input().to(torch.int32),
        }
        if weight.bias is not None:
            parts["bias"] = half(weight.bias, "a bias")
        return parts

    def unpack(
        self, parts: Mapping[str, Tensor], scheme: WeightScheme, activations: ActivationScheme | None = None
    ) -> QuantizedWeight:
        """``g_idx`` and ``bias`` may be absent."""
        qweight = require(parts, "qweight", torch.int32, 2)
        qzeros = require(parts, "qzeros", torch.int32, 2)
        scales = require(parts, "scales", dim=2).t().contiguous().to(torch.float32)
        codes = PackedCodes((qweight.t(),), scheme.bits, _values(qweight.t(), scheme.bits))
        count = _values(qzeros, scheme.bits)
        zeros: Tensor | None = None
        less = 1 if self.name == "gptq" else 0
        if not scheme.symmetric:
            zeros = (unpack_words(qzeros, scheme.bits, count).t().contiguous() + less) & scheme.max_code
        elif bool((qzeros != pack_words(torch.full((1, count), scheme.zero - less), scheme.bits)).any()):
            raise CheckpointError(
                f"the configuration says symmetric, but a zero point is not {scheme.zero}; "
                'is "sym" or "checkpoint_format" wrong?'
            )
        g_idx = parts["g_idx"].to(torch.int32) if "g_idx" in parts else None
        weight = QuantizedWeight(scheme, codes, scales, zeros, g_idx, bias_from(parts, codes.outputs), activations)
        weight.check()
        return in_order(weight)

    def shape(
        self, scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        words, out = shapes["qweight"]
        return out, words * 32 // scheme.bits

    def config_of(self, spec: QuantSpec) -> dict[str, Any]:
        """``act_order`` is ``desc_act`` to readers: groups that do not follow the order of the input."""
        if spec.activations is not None or spec.kv_cache is not None or spec.weights.grid is not INTEGERS:
            raise UsageError(_SAYS_TOO_LITTLE)
        dynamic: dict[str, dict[str, Any]] = {}
        for pattern in _patterns(module for module in spec.ignored if module != "lm_head"):
            dynamic[f"-:{pattern}"] = {}
        for scheme in dict.fromkeys(spec.overrides.values()):
            for pattern in _patterns(module for module, own in spec.overrides.items() if own == scheme):
                dynamic[f"+:{pattern}"] = _fields(scheme)
        return {
            "quant_method": "gptq",
            "checkpoint_format": self.name,
            **_fields(spec.weights),
            "desc_act": spec.act_order,
            "lm_head": "lm_head" not in spec.ignored,
            **({"dynamic": dynamic} if dynamic else {}),
            "meta": meta_of(spec),
        }

    def spec_of(self, config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
        """The regular expressions of ``dynamic`` are tried in order; the first that matches wins."""
        if "bits" not in config:
            raise CheckpointError('the GPTQ configuration lacks "bits"')
        weights = _scheme(config, WeightScheme(bits=4, group_size=128))
        overrides: dict[str, WeightScheme] = {}
        ignored = [] if config.get("lm_head") else ["lm_head"]
        dynamic = config.get("dynamic")
        rules = _rules({} if dynamic is None else dynamic)
        for module in modules:
            for skip, pattern, scheme_fields in rules:
                if pattern.match(module):
                    if skip:
                        ignored += [module] if module not in ignored else []
                    elif (scheme := _scheme(scheme_fields, weights)) != weights:
                        overrides[module] = scheme
                    break
        return QuantSpec(
            method=method_of(config, "gptq"),
            weights=weights,
            act_order=bool(config.get("desc_act", False)),
            overrides=overrides,
            ignored=tuple(ignored),
        )


def _values(packed: Tensor, bits: int) -> int:
    """How many each row of int32 words holds, which are all full."""
    count, words = period(bits)
    stored = packed.shape[1]
    if stored % words:
        raise CheckpointError(f"{stored} words of {bits}-bit values are not a multiple of {words}")
    return stored // words * count


def _fields(scheme: WeightScheme) -> dict[str, Any]:
    if scheme.grid is not INTEGERS or scheme.bits not in BITS or scheme.rows != 1:
        raise UsageError(f"the GPTQ format cannot hold {scheme}; choose another --format")
    return {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def _scheme(fields: Mapping[str, Any], default: WeightScheme) -> WeightScheme:
    scheme = scheme_from(
        "GPTQ",
        bits=fields.get("bits", default.bits),
        group_size=fields.get("group_size", default.group_size),
        symmetric=fields.get("sym", default.symmetric),
    )
    if scheme.bits not in BITS:
        raise CheckpointError(f"GPTQ configuration: bits must be 2, 3, 4 or 8, not {scheme.bits}")
    return scheme


def _rules(dynamic: object) -> list[tuple[bool, re.Pattern[str], Mapping[str, Any]]]:
    """(skip, pattern, fields) in order; a pattern without a prefix overrides."""
    if not isinstance(dynamic, dict):
        raise CheckpointError('GPTQ configuration: "dynamic" must be an object of patterns')
    rules: list[tuple[bool, re.Pattern[str], Mapping[str, Any]]] = []
    for key, fields in dynamic.items():
        skip = key.startswith("-:")
        pattern = pattern_from("GPTQ", key[2:] if skip or key.startswith("+:") else key)
        rules.append((skip, pattern, fields if isinstance(fields, dict) else {}))
    return rules


def _patterns(modules: Iterable[str]) -> list[str]:
    """Regular expressions that match exactly ``modules``, one per kind of linear rather than one per layer.

    Siblings that loaders fuse share a pattern that names the fused module too, so a loader that asks for
    ``qkv_proj`` finds what was written for ``q_proj``, ``k_proj`` and ``v_proj``.
    """
    layers: dict[tuple[str, str, str], list[str]] = {}
    for module in modules:
        found = re.fullmatch(r"(.*?\.)(\d+)(\..*?)([^.]+)", module)
        prefix, layer, middle, leaf = found.groups() if found else (module, "", "", "")
        layers.setdefault((prefix, middle, leaf), []).append(layer)
    leaves = {key: [key[2]] for key in layers}
    for fused, siblings in FUSED.items():
        for prefix, middle, leaf in list(leaves):
            keys = [(prefix, middle, sibling) for sibling in siblings]
            if leaf == siblings[0] and all(layers.get(key) == layers[keys[0]] for key in keys):
                leaves[keys[0]] = [*siblings, fused]
                for key in keys[1:]:
                    del leaves[key]
    return [
        re.escape(prefix) + _either(layers[prefix, middle, leaf]) + re.escape(middle) + _either(names) + "$"
        for (prefix, middle, leaf), names in leaves.items()
    ]


def _either(texts: list[str]) -> str:
    escaped = [re.escape(text) for text in texts]
    return escaped[0] if len(escaped) == 1 else "(?:" + "|".join(escaped) + ")"
