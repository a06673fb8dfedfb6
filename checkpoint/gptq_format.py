"""The GPTQ on-disk format: codes in 32-bit words, fp16 scales, zero points, and its configuration in JSON.

Knows bits and field names; does not know files, nor how a weight was quantized.

W is [out, in], b the bits; the parts of one linear are
    qweight  int32 [in * b / 32, out]       codes along the input, the first in the lowest bits
    qzeros   int32 [groups, out * b / 32]   zero points along the output, in natural order
    scales   float16 [groups, out]
    g_idx    int32 [in]                     the group of each input feature
    bias     float16 [out]                  only where the linear has one
Version ``gptq`` stores zero point minus one, ``gptq_v2`` the zero point itself. At 3 bits 32 values fill
3 words, so that values 10 and 21 cross a word's end; at 2, 4 and 8 bits none does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.packed import PackedWeight
from qserve.checkpoint.spec import Method, QuantSpec, WeightScheme

Version = Literal["gptq", "gptq_v2"]
PARTS = ("qweight", "qzeros", "scales", "g_idx", "bias")

# Loaders that fuse these siblings look up the fused name in ``dynamic``.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _period(bits: int) -> tuple[int, int]:
    """(values, words): the smallest run of values that fills whole words."""
    return (32, 3) if bits == 3 else (32 // bits, 1)


def pack_words(values: Tensor, bits: int) -> Tensor:
    """uint8 [n, m] -> int32 [n * bits / 32, m], packed along the first dimension.

    ``n`` must fill whole words; raises ``CheckpointError`` where it does not.
    """
    count, words = _period(bits)
    rows, columns = values.shape
    if rows % count:
        raise CheckpointError(f"{rows} values of {bits} bits do not fill 32-bit words (of {count} each)")
    packed = torch.zeros(rows // count, words, columns, dtype=torch.int64)
    for index in range(count):
        word, shift = divmod(index * bits, 32)
        value = values[index::count].to(torch.int64)
        packed[:, word] |= value << shift
        if shift + bits > 32:
            packed[:, word + 1] |= value >> (32 - shift)
    packed &= 0xFFFFFFFF
    # Two's complement: what exceeds int32 wraps to the negative numbers.
    return (packed - ((packed >> 31) << 32)).to(torch.int32).reshape(-1, columns)


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """int32 [n * bits / 32, m] -> uint8 [n, m]: the inverse of ``pack_words``."""
    count, words = _period(bits)
    rows, columns = packed.shape
    if rows % words:
        raise CheckpointError(f"{rows} words of {bits}-bit values are not a multiple of {words}")
    source = packed.reshape(-1, words, columns)
    values = torch.empty(source.shape[0], count, columns, dtype=torch.uint8)
    mask = (1 << bits) - 1
    for index in range(count):
        word, shift = divmod(index * bits, 32)
        # The arithmetic shift drags the sign in from the left; the mask keeps only what this word holds.
        value = (source[:, word] >> shift) & min(mask, (1 << (32 - shift)) - 1)
        if shift + bits > 32:
            value = value | ((source[:, word + 1] << (32 - shift)) & mask)
        values[:, index] = value.to(torch.uint8)
    return values.reshape(-1, columns)


def pack(weight: PackedWeight, version: Version = "gptq") -> dict[str, Tensor]:
    """The tensors of one linear, by part name. Scales and bias are rounded to float16.

    Raises ``CheckpointError`` where the format cannot hold the weight: sizes that do not fill words, a scale
    beyond float16, or a zero point of 0 in version ``gptq`` (minus one borrows from its neighbour).
    """
    bits = weight.scheme.bits
    if weight.scheme.dtype != "int":
        raise CheckpointError(f"the GPTQ format holds integers, not {weight.scheme.dtype}")
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full(weight.scales.shape, weight.scheme.zero, dtype=torch.uint8)
    if version == "gptq":
        if bool((zeros == 0).any()):
            raise CheckpointError("GPTQ version 1 cannot store a zero point of 0; write gptq_v2")
        zeros = zeros - 1
    scales = weight.scales.to(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError("a scale does not fit float16")
    parts = {
        "qweight": pack_words(weight.codes.t(), bits),
        "qzeros": pack_words(zeros, bits).t().contiguous(),
        "scales": scales.t().contiguous(),
        "g_idx": weight.group_of_input().to(torch.int32),
    }
    if weight.bias is not None:
        bias = weight.bias.to(torch.float16)
        if not bool(torch.isfinite(bias).all()):
            raise CheckpointError("a bias does not fit float16")
        parts["bias"] = bias
    return parts


def unpack(parts: Mapping[str, Tensor], scheme: WeightScheme, version: Version = "gptq") -> PackedWeight:
    """The linear stored in ``parts`` (``g_idx`` and ``bias`` may be absent): the inverse of ``pack``.

    Raises ``CheckpointError`` where a part is missing or contradicts ``scheme``.
    """
    for name in ("qweight", "qzeros", "scales"):
        if name not in parts:
            raise CheckpointError(f"{name} is missing")
    for name in ("qweight", "qzeros"):
        if (part := parts[name]).dtype != torch.int32 or part.dim() != 2:
            raise CheckpointError(f"{name} must be an int32 matrix, not {part.dtype} {list(part.shape)}")
    codes = unpack_words(parts["qweight"], scheme.bits).t().contiguous()
    zeros: Tensor | None = unpack_words(parts["qzeros"].t(), scheme.bits).contiguous()
    assert zeros is not None
    if version == "gptq":
        zeros = (zeros + 1) & scheme.max_code
    if scheme.symmetric:
        if bool((zeros != scheme.zero).any()):
            raise CheckpointError(
                f"the configuration says symmetric, but a zero point is not {scheme.zero}; "
                'is "sym" or "checkpoint_format" wrong?'
            )
        zeros = None
    g_idx = parts["g_idx"].to(torch.int32) if "g_idx" in parts else None
    bias = parts["bias"].to(torch.float32) if "bias" in parts else None
    if bias is not None and tuple(bias.shape) != (codes.shape[0],):
        raise CheckpointError(f"bias is {tuple(bias.shape)}, expected {(codes.shape[0],)}")
    scales = parts["scales"].t().to(torch.float32).contiguous()
    weight = PackedWeight(scheme, codes, scales, zeros, g_idx, bias)
    weight.check()
    in_order = torch.arange(weight.in_features, dtype=torch.int32) // scheme.group_width(weight.in_features)
    if g_idx is not None and torch.equal(g_idx, in_order):
        return PackedWeight(scheme, codes, scales, zeros, None, bias)
    return weight


def config_of(spec: QuantSpec, version: Version = "gptq") -> dict[str, Any]:
    """The ``quantization_config`` of ``spec``. ``act_order`` is what readers call ``desc_act``: groups that
    do not follow the order of the input. Raises ``UsageError`` where the format cannot say it."""
    if spec.activations is not None or spec.kv_cache is not None or spec.weights.dtype != "int":
        raise UsageError("the GPTQ format quantizes weights to integers only; choose another --format")
    dynamic: dict[str, dict[str, Any]] = {}
    for pattern in _patterns(module for module in spec.ignored if module != "lm_head"):
        dynamic[f"-:{pattern}"] = {}
    for scheme in dict.fromkeys(spec.overrides.values()):
        for pattern in _patterns(module for module, own in spec.overrides.items() if own == scheme):
            dynamic[f"+:{pattern}"] = _fields(scheme)
    return {
        "quant_method": "gptq",
        "checkpoint_format": version,
        **_fields(spec.weights),
        "desc_act": spec.act_order,
        "lm_head": "lm_head" not in spec.ignored,
        **({"dynamic": dynamic} if dynamic else {}),
        "meta": {"quantizer": [f"qserve:{metadata.version('qserve-llm')}"], "method": spec.method},
    }


def version_of(config: Mapping[str, Any]) -> Version:
    """The version named by ``checkpoint_format``; raises ``CheckpointError`` for one we do not read."""
    name = "marlin" if config.get("is_marlin_format") else config.get("checkpoint_format") or "gptq"
    if name == "gptq":
        return "gptq"
    if name == "gptq_v2":
        return "gptq_v2"
    raise CheckpointError(f"GPTQ checkpoint_format {name!r} is not supported; supported: gptq, gptq_v2")


def spec_of(config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
    """Read a ``quantization_config``. ``modules`` are the linears of the model: the regular expressions of
    ``dynamic`` are resolved against them, the first that matches wins.

    Raises ``CheckpointError`` for another method or for fields that make no sense.
    """
    method = config.get("quant_method", "gptq")
    if method != "gptq":
        raise CheckpointError(f"quant_method {method!r} is not supported; qserve reads gptq")
    version_of(config)
    weights = _scheme(config, WeightScheme(bits=4, group_size=128))
    if "bits" not in config:
        raise CheckpointError('the GPTQ configuration lacks "bits"')
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
    meta = config.get("meta")
    maker: Method = "gptq"
    if isinstance(meta, dict) and meta.get("method") in get_args(Method):
        maker = meta["method"]
    return QuantSpec(
        method=maker,
        weights=weights,
        act_order=bool(config.get("desc_act", False)),
        overrides=overrides,
        ignored=tuple(ignored),
    )


def _fields(scheme: WeightScheme) -> dict[str, Any]:
    return {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def _scheme(fields: Mapping[str, Any], default: WeightScheme) -> WeightScheme:
    bits, group_size = fields.get("bits", default.bits), fields.get("group_size", default.group_size)
    sym = fields.get("sym", default.symmetric)
    if type(bits) is not int or type(group_size) is not int or type(sym) is not bool:
        raise CheckpointError(f"GPTQ configuration: bits={bits!r}, group_size={group_size!r}, sym={sym!r}")
    try:
        return WeightScheme(bits=bits, group_size=group_size, symmetric=sym)
    except UsageError as error:
        raise CheckpointError(f"GPTQ configuration: {error}") from None


def _rules(dynamic: object) -> list[tuple[bool, re.Pattern[str], Mapping[str, Any]]]:
    """(skip, pattern, fields) in order; a pattern without a prefix overrides."""
    if not isinstance(dynamic, dict):
        raise CheckpointError('GPTQ configuration: "dynamic" must be an object of patterns')
    rules: list[tuple[bool, re.Pattern[str], Mapping[str, Any]]] = []
    for key, fields in dynamic.items():
        skip = key.startswith("-:")
        try:
            pattern = re.compile(key[2:] if skip or key.startswith("+:") else key)
        except re.error as error:
            raise CheckpointError(f"GPTQ configuration: pattern {key!r} is invalid ({error})") from None
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
