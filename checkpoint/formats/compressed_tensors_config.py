"""The configuration of compressed-tensors: groups of targets, each with its scheme for weights and inputs.

A target is a module's name, a regular expression after ``re:``, or a class
(``Linear``, ``Embedding``); the most specific one that matches a module counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats.format import (
    is_embedding,
    kv_cache_of,
    meta_of,
    method_of,
    names_from,
    pattern_from,
    scheme_from,
)
from qserve.checkpoint.grid import E2M1, E4M3, INTEGERS, TRELLIS
from qserve.checkpoint.spec import (
    INT4_KV,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_INPUTS,
    ActivationScheme,
    KVScheme,
    QuantSpec,
    WeightScheme,
)

_WHAT = "compressed-tensors"
Granularity = Literal["token", "group", "tensor"]
Layout = Literal[
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized", "mxfp8-quantized", "trellis"
]  # fmt: skip
"""``trellis`` is qserve's own."""
_FP4: dict[WeightScheme, Layout] = {MXFP4: "mxfp4-pack-quantized", NVFP4: "nvfp4-pack-quantized"}
_TYPES = {INTEGERS: "int", E4M3: "float", E2M1: "float", TRELLIS: "trellis"}
_MIXED = "mixed-precision"
_PLAIN_ORDER = (None, False, "weight", "static")


def layout(scheme: WeightScheme, activations: ActivationScheme | None) -> Layout:
    """The format's name for the layout in which a module of this kind is written."""
    if reason := unsayable(scheme, activations):
        raise UsageError(reason)
    if scheme.grid is E2M1:
        return _FP4[scheme]
    if scheme.grid is TRELLIS:
        return "trellis"
    if scheme == MXFP8:
        return "mxfp8-quantized"
    if scheme.grid is E4M3:
        return "naive-quantized" if activations is None else "float-quantized"
    return "pack-quantized" if activations is None or scheme.bits != 8 else "int-quantized"


def unsayable(scheme: WeightScheme, activations: ActivationScheme | None) -> str | None:
    """Why the configuration cannot express a scheme, or None."""
    if scheme.grid not in _TYPES or (scheme.grid is E2M1 and scheme not in _FP4):
        return f"{scheme} weights are not written as compressed-tensors"
    if scheme.rows != 1 and (scheme.rows == -1) != (scheme.group_size == -1):
        return f"compressed-tensors cannot say {scheme}"
    if scheme.rows != 1 and not scheme.symmetric:
        return f"compressed-tensors stores zero points per group or channel, not for {scheme}"
    if activations is not None and (activations.grid is E2M1 or scheme.grid in (E2M1, TRELLIS)):
        if scheme == NVFP4 and activations.grid is E2M1:
            return None
        return f"compressed-tensors is written with {scheme.dtype} weights only where inputs are not rounded"
    if scheme.grid is TRELLIS and scheme.rows != 1:
        return f"compressed-tensors cannot say {scheme}"
    if activations is not None and activations.grid is E4M3 and scheme.grid is INTEGERS and scheme.bits == 8:
        return "compressed-tensors has no layout for int8 weights with fp8 inputs"
    if activations is not None and activations.grid is INTEGERS and scheme.grid is E4M3:
        return "compressed-tensors has no layout for fp8 weights with int8 inputs"
    return None


def config_of(spec: QuantSpec) -> dict[str, Any]:
    """The modules of ``overrides`` and ``float_inputs`` are listed by name; ``Linear`` stands for all others."""
    named: dict[tuple[WeightScheme, ActivationScheme | None], list[str]] = {}
    default = (spec.weights, spec.activations)
    for module in dict.fromkeys((*spec.overrides, *spec.float_inputs)):
        scheme = spec.scheme_of(module)
        if scheme is not None and ((kind := (scheme, spec.activations_of(module))) != default or is_embedding(module)):
            named.setdefault(kind, []).append(module)
    groups = [(["Linear"], default), *((modules, kind) for kind, modules in named.items())]
    layouts = {layout(*kind) for _, kind in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": _group(targets, *kind) for i, (targets, kind) in enumerate(groups)},
        "ignore": list(spec.ignored),
        "kv_cache_scheme": None if spec.kv_cache in (None, INT4_KV) else _kv_args(spec.kv_cache),
        "global_compression_ratio": None,
        "meta": meta_of(spec),
    }


def _group(targets: list[str], scheme: WeightScheme, activations: ActivationScheme | None) -> dict[str, Any]:
    if reason := unsayable(scheme, activations):
        raise UsageError(f"{targets[0]}: {reason}")
    inputs = None
    if activations is not None and activations.grid is E2M1:
        inputs = _nvfp4_args(dynamic="local")
    elif activations is not None:
        inputs = _args(8, _TYPES[activations.grid], activations.granularity,
                       group_size=None if activations.group_size == -1 else activations.group_size,
                       dynamic=activations.dynamic)
    strategies = {(-1, 1): "channel", (-1, -1): "tensor"}
    strategy = strategies.get((scheme.group_size, scheme.rows), "group" if scheme.rows == 1 else "block")
    weights = _args(scheme.bits, _TYPES[scheme.grid], strategy, symmetric=scheme.symmetric,
                    group_size=scheme.group_size if strategy == "group" else None)
    if scheme in (MXFP4, MXFP8):
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    if scheme == NVFP4:
        weights = _nvfp4_args(dynamic=False)
    if strategy == "block":
        weights["block_structure"] = [scheme.rows, scheme.group_size]
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": layout(scheme, activations),
    }


def _nvfp4_args(dynamic: bool | str) -> dict[str, Any]:
    """``local``: a scale for each group is chosen for its numbers, within a static one for all."""
    stored = "torch.float8_e4m3fn"
    args = _args(4, "float", "tensor_group", group_size=16)
    return args | {"dynamic": dynamic, "scale_dtype": stored, "zp_dtype": stored}


def _kv_args(kv_cache: KVScheme) -> dict[str, Any]:
    return _args(8, _TYPES[kv_cache.grid], "tensor" if kv_cache.granularity == "tensor" else "attn_head")


def _args(num_bits: int, kind: str, strategy: str, *, symmetric: bool = True, group_size: int | None = None,
          dynamic: bool = False) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": kind, "symmetric": symmetric, "strategy": strategy,
            "group_size": group_size, "dynamic": dynamic}


@dataclass(frozen=True)
class _Group:
    targets: tuple[str | re.Pattern[str], ...]
    weights: WeightScheme
    activations: ActivationScheme | None
    act_order: bool

    def rank(self, module: str) -> int | None:
        """How specifically a target matches: 0 by name, 1 by expression, 2 by class; None where none does."""
        kind = "Embedding" if is_embedding(module) else "Linear"
        ranks = [
            1 if isinstance(target, re.Pattern) else 2 if target == kind else 0
            for target in self.targets
            if (target.match(module) if isinstance(target, re.Pattern) else target in (module, kind))
        ]
        return min(ranks, default=None)


def spec_of(config: Mapping[str, Any], modules: Iterable[str] = ()) -> QuantSpec:
    """The group of the class ``Linear``, or the first, becomes the default of the specification."""
    groups = _groups(config)
    if any(group.activations is not None and group.activations.grid is not E2M1 for group in groups):
        # One scheme serves all inputs: beside those of 8 bits those of 4 stay finer.
        fine = [None if group.activations and group.activations.grid is E2M1 else group.activations for group in groups]
        groups = [replace(group, activations=each) for group, each in zip(groups, fine, strict=True)]
    ignore = [_target(name) for name in names_from(_WHAT, "ignore", config.get("ignore"))]
    found: dict[str, _Group] = {}
    ignored = []
    for module in dict.fromkeys(("lm_head", *modules)):
        group = None if _listed(module, ignore) else _match(module, groups)
        if group is not None:
            found[module] = group
        elif not is_embedding(module) or _listed(module, ignore):
            ignored.append(module)
    default = next((group for group in groups if "Linear" in group.targets), groups[0])
    activations = _one_scheme([group.activations for group in groups])
    return QuantSpec(
        method=method_of(config, "unknown"),
        weights=default.weights,
        activations=activations,
        kv_cache=_kv_cache(config.get("kv_cache_scheme")) or kv_cache_of(config),
        act_order=any(group.act_order for group in groups),
        overrides={module: group.weights for module, group in found.items()
                   if group.weights != default.weights or is_embedding(module)},
        ignored=tuple(ignored),
        float_inputs=tuple(module for module, group in found.items()
                           if activations is not None and group.activations is None),
    )


def _listed(module: str, names: list[str | re.Pattern[str]]) -> bool:
    """Whether a list such as ``ignore`` names ``module`` or its class."""
    kind = "Embedding" if is_embedding(module) else "Linear"
    return any(bool(name.match(module)) if isinstance(name, re.Pattern) else name in (module, kind) for name in names)


def _match(module: str, groups: list[_Group]) -> _Group | None:
    ranked = [(rank, i) for i, group in enumerate(groups) if (rank := group.rank(module)) is not None]
    return groups[min(ranked)[1]] if ranked else None


def _target(text: str) -> str | re.Pattern[str]:
    return pattern_from(_WHAT, text.removeprefix("re:")) if text.startswith("re:") else text


def _groups(config: Mapping[str, Any]) -> list[_Group]:
    entries = config.get("config_groups")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f'{_WHAT} configuration: "config_groups" must be an object with at least one group')
    if config.get("transform_config"):
        raise CheckpointError(f"{_WHAT} configuration: transform_config (rotated weights) is not supported")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"{_WHAT} configuration: sparsity format {sparsity['format']!r} is not supported")
    groups = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("weights"), dict):
            raise CheckpointError(f'{_WHAT} configuration: {name} must be an object with "weights"')
        stored = entry.get("format") or config.get("format")
        if stored not in get_args(Layout):
            supported = ", ".join(get_args(Layout))
            raise CheckpointError(f"{_WHAT} format {stored!r} is not supported; supported: {supported}")
        if entry.get("output_activations"):
            raise CheckpointError(f"{_WHAT} configuration: {name} rounds outputs, which is not supported")
        order = entry["weights"].get("actorder")
        if order not in (*_PLAIN_ORDER, "group", "dynamic"):
            raise CheckpointError(f"{_WHAT} configuration: actorder {order!r} is not supported")
        weights = _weights(entry["weights"])
        own = "trellis" if weights.grid is TRELLIS else _FP4.get(weights, "") if weights.grid is E2M1 else None
        if own != (stored if stored in ("trellis", *_FP4.values()) else None) or (
            stored == "mxfp8-quantized" and weights != MXFP8
        ):
            raise CheckpointError(f"{_WHAT} format {stored!r} does not hold {weights}")
        targets = names_from(_WHAT, f"targets of {name}", entry.get("targets"))
        groups.append(_Group(tuple(_target(text) for text in targets), weights,
                             _activations(entry.get("input_activations")), order not in _PLAIN_ORDER))
    return groups


def _weights(args: Mapping[str, Any]) -> WeightScheme:
    kind, bits, strategy, size = (args.get(key) for key in ("type", "num_bits", "strategy", "group_size"))
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    rows: object = 1
    if strategy == "block":
        block = args.get("block_structure")
        if isinstance(block, str):  # "128x128", as older writers put it
            block = [int(part) if part.isdecimal() else part for part in block.split("x")]
        if not isinstance(block, list) or len(block) != 2:
            raise CheckpointError(f"{_WHAT} configuration: block_structure is {block!r}, expected two sizes")
        rows, size = block
    elif strategy in ("channel", "tensor"):
        rows, size = (1 if strategy == "channel" else -1), -1
    elif strategy != "group" and not (strategy == "tensor_group" and bits == 4 and kind == "float"):
        raise CheckpointError(f"{_WHAT} configuration: weight strategy {strategy!r} is not supported")
    if kind not in ("int", "float", "trellis", None) or (kind == "float" and bits not in (4, 8)):
        raise CheckpointError(f"{_WHAT} configuration: weights of type {kind!r} with {bits} bits are not supported")
    scheme = scheme_from(_WHAT, bits=bits, group_size=size, symmetric=args.get("symmetric", True), rows=rows,
                         dtype=kind or "int" if kind != "float" else "fp4" if bits == 4 else "fp8")
    if not scheme.symmetric and rows != 1:
        raise CheckpointError(f"{_WHAT} configuration: zero points for {scheme} are not supported")
    return scheme


def _activations(args: object) -> ActivationScheme | None:
    """Inputs in floats of four bits are those of NVFP4, or None: others stay finer."""
    if isinstance(args, dict) and (args.get("num_bits"), args.get("type")) == (4, "float"):
        nvfp4 = (args.get("strategy"), args.get("group_size")) == ("tensor_group", 16)
        return NVFP4_INPUTS if nvfp4 else None
    if args is None:
        return None
    if not isinstance(args, dict) or args.get("type", "int") not in ("int", "float") or args.get("num_bits") != 8:
        raise CheckpointError(f"{_WHAT} configuration: input_activations must be of 8 bits, not {args!r}")
    if not args.get("symmetric", True):
        raise CheckpointError(f"{_WHAT} configuration: asymmetric input_activations are not supported")
    size = args.get("group_size")
    strategy, dynamic = args.get("strategy") or ("group" if size else "tensor"), args.get("dynamic", False)
    if strategy not in get_args(Granularity) or type(dynamic) is not bool:
        raise CheckpointError(f"{_WHAT} configuration: input_activations per {strategy!r} are not supported")
    if strategy != "group":
        size = -1
    elif type(size) is not int or size < 1:
        raise CheckpointError(f"{_WHAT} configuration: input_activations have group_size {size!r}")
    try:
        return ActivationScheme(
            dtype="fp8" if args.get("type") == "float" else "int8",
            granularity=cast(Granularity, strategy),
            dynamic=dynamic,
            group_size=size,
        )
    except UsageError as error:
        raise CheckpointError(f"{_WHAT} configuration: {error}") from None


def _one_scheme(schemes: list[ActivationScheme | None]) -> ActivationScheme | None:
    rounded = list(dict.fromkeys(scheme for scheme in schemes if scheme is not None))
    if len(rounded) > 1:
        raise CheckpointError(f"{_WHAT} configuration: inputs are rounded as {rounded[0]} and as {rounded[1]}; "
                              "one scheme for all is supported")
    return rounded[0] if rounded else None


def _kv_cache(args: object) -> KVScheme | None:
    if args is None:
        return None
    strategy = args.get("strategy") or "tensor" if isinstance(args, dict) else None
    if (
        not isinstance(args, dict)
        or args.get("num_bits") != 8
        or args.get("type") not in ("int", "float")
        or args.get("dynamic", False) is not False
        or not args.get("symmetric", True)
        or strategy not in ("tensor", "attn_head")
    ):
        raise CheckpointError(f"{_WHAT} configuration: kv_cache_scheme must be static, symmetric, of 8 bits, "
                              f"per tensor or attn_head, not {args!r}")
    return KVScheme("int8" if args["type"] == "int" else "fp8", "tensor" if strategy == "tensor" else "head")
