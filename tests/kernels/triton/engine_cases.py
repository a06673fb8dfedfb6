"""What the ahead-of-time tests of the kernels beside the linear products compile: ``cases`` in the default suite,
``every_case`` in CI.

Loaded by ``aot.py`` as a program, and by the tests for the names.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import torch
import triton

from qserve.kernels.kv_cache import PACKED_HEADS
from qserve.kernels.ops import PACKED_KV, Function
from qserve.kernels.triton import (
    argmax,
    attention,
    embed,
    experts,
    fill,
    gather,
    grouped,
    inputs,
    log_softmax,
    lora,
    norm,
    packed_kv,
    pointwise,
    rope_kv,
    route,
    split_decode,
)
from qserve.kernels.triton.target import AMD, Target, described
from tests.kernels.triton.aot import Case

ARCHITECTURES = tuple(map(described, ("sm_80", "sm_89", "sm_90", "sm_100")))
CACHES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "i8": torch.int8,
    "u8": torch.uint8,
}
"""u8 has codes of 4 bits."""


def _case(
    kernel: Any, pointers: str, gpu: Target, known: dict[str, Any], numbers: str = "", warps: int = 4,
    stages: int = 3,
) -> Case:  # fmt: skip
    """``pointers`` and ``numbers`` as ``name:type``; a pointer of no type is absent."""
    signature = dict(word.split(":") for word in pointers.split())
    absent = [name for name, kind in signature.items() if not kind]
    signature = {name: f"*{kind}" for name, kind in signature.items() if kind}
    full = signature | dict(word.split(":") for word in numbers.split())
    return Case(kernel, full, known | dict.fromkeys(absent), gpu.architecture, warps, stages, tuple(signature))


def attention_op(
    cache: str, window: int = 0, dim: int = 128, heads: int = 32, kv_heads: int = 8, softcap: float = 0.0,
    activations: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    """As much of an operation as decides how its kernels are compiled."""
    return SimpleNamespace(
        heads=heads, kv_heads=kv_heads, head_dim=dim, window=window, softcap=softcap,
        k_cache=torch.empty(0, dtype=CACHES[cache]), kv_dtype=PACKED_KV if cache == "u8" else CACHES[cache],
        qkv=torch.empty(0, dtype=activations),
    )  # fmt: skip


def attention_cases(
    gpu: Target, cache: str, window: int = 0, dim: int = 128, heads: int = 32, kv_heads: int = 8,
    *, softcap: float = 0.0, invariant: bool = False, activations: str = "bf16",
) -> dict[str, Case]:  # fmt: skip
    """The kernels of attention by name, as the launchers would specialize them."""
    scales = "fp32" if cache in ("fp8e4nv", "i8") else ""
    dtype = torch.float32 if activations == "fp32" else torch.bfloat16
    op = attention_op(cache, window, dim, heads, kv_heads, softcap, dtype)
    common = f"qkv_ptr:{activations} out_ptr:{activations} k_ptr:{cache} k_scale_ptr:{scales} v_scale_ptr:{scales} "
    common += f"positions_ptr:i32 staged_ptr:i32 sinks_ptr:{'fp32' if window else ''} "
    tile, decode = attention.tile_shape(op, gpu, invariant), attention.decode_shape(op)
    if invariant:
        decode = tile
    values = {shape: f"v_ptr:{'i16' if shape.pairs else cache} " for shape in (tile, decode)}
    ptx = {"PTX": "ptx" in gpu.features}
    known = attention.constants(op, decode) | ptx
    merged = attention.merge_constants(op, known)
    kernel, pointers = split_decode.split_decode_kernel, "arrived_ptr:i32 splits_ptr:i32"
    if invariant:
        kernel, pointers = attention.decode_kernel, "units_ptr:i32 count_ptr:i32"
    else:
        known = split_decode.split_constants(op, decode) | ptx
    return {
        "attention tiles": _case(
            attention.tile_kernel, common + values[tile] + "tiles_ptr:i32", gpu,
            attention.constants(op, tile) | ptx | {"FOLDS": tile.folds}, "scale:fp32", tile.warps, tile.stages,
        ),
        "attention decodes": _case(
            kernel, common + values[decode] + f"partial_ptr:fp32 softmax_ptr:fp32 {pointers}", gpu, known, "scale:fp32",
            decode.warps, decode.stages,
        ),
        "attention merge": _case(
            attention.merge_kernel,
            f"out_ptr:{activations} partial_ptr:fp32 softmax_ptr:fp32 v_scale_ptr:{scales} decodes_ptr:i32 "
            f"positions_ptr:i32 sinks_ptr:{'fp32' if window else ''}",
            gpu, merged, stages=merged["STAGES"],
        ),
    }  # fmt: skip


def rope_case(
    gpu: Target, cache: str, norm: str = "fp32", center: str = "fp32", turned: int = 64, scale: str = ""
) -> Case:
    scales = "fp32" if cache in ("fp8e4nv", "i8") else ""
    pointers = (
        f"qkv_ptr:bf16 cosine_ptr:fp32 sine_ptr:fp32 q_norm_ptr:{norm} k_norm_ptr:{norm} k_center_ptr:{center} "
        f"q_scale_ptr:{scale} "
        f"k_scale_ptr:{scales} v_scale_ptr:{scales} k_cache_ptr:{cache} v_cache_ptr:{cache} positions_ptr:i32 "
        "slots_ptr:i32"
    )
    known = {
        "HEADS": 32, "KV_HEADS": 8, "DIM": 128, "TURNED": turned, "BLOCK_HALF": 64, "PAGE": 16,
        "TOKENS": rope_kv.TOKENS, "ENCODING": {"i8": 1, "fp8e4nv": 2, "u8": 3}.get(cache, 0),
    }  # fmt: skip
    return _case(rope_kv.rope_kv_kernel, pointers, gpu, known, "tokens:i32 eps:fp32", warps=1)


def packed_cases(gpu: Target, dim: int = 128, heads: int = 32) -> dict[str, Case]:
    """What a cache of 4 bits needs around attention."""
    known = packed_kv.head_constants(attention_op("u8", dim=dim, heads=heads))
    return {
        "packed_kv store": _case(
            packed_kv.store_kernel, "qkv_ptr:bf16 k_ptr:u8 v_ptr:u8 slots_ptr:i32", gpu,
            known | {"KV_HEADS": 8, "PAGE": 16}, "tokens:i32", warps=1,
        ),
        "packed_kv back": _case(packed_kv.turn_back_kernel, "out_ptr:bf16", gpu, known, "tokens:i32", warps=1),
    }  # fmt: skip


def rounding(codes: str) -> tuple[str, str, dict[str, Any]]:
    """Pointers, numbers and constants of a kernel that rounds its row to ``codes``, or to nothing."""
    pointers = f"codes_ptr:{codes} scales_ptr:{'fp32' if codes else ''}"
    return pointers, "stride_codes:i32 input_scale:fp32", {"STATIC": False, "LIMIT": 127.0 if codes == "i8" else 448.0}


def norm_case(gpu: Target, codes: str = "", width: int = 4096, bias: str = "", **kind: bool) -> Case:
    pointers, numbers, known = rounding(codes)
    block = triton.next_power_of_2(width)
    kind = {"CENTER": False, "ACCUMULATE": False} | kind
    out = "fp32" if kind["ACCUMULATE"] else "bf16"
    made = _case(
        norm.norm_kernel, f"x_ptr:fp32 weight_ptr:fp32 bias_ptr:{bias} out_ptr:{out} {pointers}", gpu,
        known | kind | {"WIDTH": width, "BLOCK": block}, f"stride_x:i32 stride_out:i32 eps:fp32 {numbers}",
        inputs.row_warps(block),
    )  # fmt: skip
    return replace(made, divisible=(*made.divisible, "stride_x", "stride_out"))


def activation_case(
    gpu: Target, codes: str = "", width: int = 14336, function: str = "silu", *, gated: bool = True
) -> Case:
    pointers, numbers, known = rounding(codes)
    block = triton.next_power_of_2(width) if codes else pointwise.BLOCK
    return _case(
        pointwise.activation_kernel, f"x_ptr:bf16 out_ptr:bf16 {pointers}", gpu,
        known | {"FUNCTION": function, "GATED": gated, "WIDTH": width, "BLOCK": block}, numbers,
        inputs.row_warps(block),
    )  # fmt: skip


def gather_case(gpu: Target, rows: str = "i32", *, accumulate: bool = False) -> Case:
    known = {"SCALE": 1.0, "OFFSET": 2 * accumulate, "ACCUMULATE": accumulate, "WIDTH": 4096, "BLOCK": gather.BLOCK}
    pointers = f"x_ptr:bf16 rows_ptr:{rows} out_ptr:fp32"
    case = _case(gather.gather_kernel, pointers, gpu, known, "stride_x:i32 stride_out:i32")
    return replace(case, divisible=(*case.divisible, "stride_x", "stride_out"))


def plain_cases(gpu: Target) -> dict[str, Case]:
    """The kernels that have one configuration, at the width of Llama-3-8B."""
    codes = "fp8e4nv" if "fp8" in gpu.features else "i8"
    vocabulary = {"WIDTH": 128256, "BLOCK": 4096}
    packed = {"SCALE": 1.0, "ZERO": 8, "GROUP": 64, "GROUPS": 64, "WIDTH": 4096, "BLOCK": embed.BLOCK}
    return {
        "norm": norm_case(gpu),
        "norm rounded": norm_case(gpu, codes),
        "activation": activation_case(gpu),
        "activation rounded": activation_case(gpu, codes),
        "gather": gather_case(gpu),
        "fill": _case(fill.fill_kernel, "ids_ptr:i32 sampled_ptr:i32", gpu, {"BLOCK": fill.BLOCK}, "count:i32"),
        "embed": _case(
            embed.embed_kernel, "ids_ptr:i32 codes_ptr:u8 scales_ptr:fp32 zeros_ptr:u8 out_ptr:fp32", gpu, packed
        ),
        "argmax": _case(argmax.argmax_kernel, "x_ptr:fp32 out_ptr:i32", gpu, vocabulary, warps=8),
        "log_softmax": _case(log_softmax.log_softmax_kernel, "x_ptr:fp32", gpu, vocabulary, warps=8),
    }  # fmt: skip


def cases_of(gpu: Target, cache: str) -> dict[str, Case]:
    made = attention_cases(gpu, cache) | plain_cases(gpu)
    made["rope_kv"] = rope_case(gpu, cache)
    return {f"{name} {gpu.architecture}": case for name, case in made.items()}


def mixture_cases(gpu: Target) -> dict[str, Case]:
    """What is around the products of experts, for the 128 of Qwen3-30B-A3B and the 256 of DeepSeek-V3."""
    routing = {
        "COUNT": 128, "GROUPS": 1, "BLOCK_GROUPS": 1, "BLOCK_SIZE": 128, "TOP_K": 8, "TOP_GROUPS": 1, "GROUP_BEST": 2,
        "BLOCK_TOP": 8, "SIGMOID": False, "RENORMALIZE": True,
    }  # fmt: skip
    by_groups = routing | {
        "COUNT": 256, "GROUPS": 8, "BLOCK_GROUPS": 8, "BLOCK_SIZE": 32, "TOP_GROUPS": 4, "SIGMOID": True,
    }  # fmt: skip
    pointers = "logits_ptr:fp32 bias_ptr:{} slots_ptr:i32 experts_ptr:i32 weights_ptr:fp32"
    return {
        "route": _case(route.route_kernel, pointers.format(""), gpu, routing, "scale:fp32", warps=1),
        "route groups": _case(route.route_kernel, pointers.format("fp32"), gpu, by_groups, "scale:fp32", warps=1),
        "experts count": _case(
            grouped.count_kernel, "experts_ptr:i32 counts_ptr:i32", gpu, {"FIRST": 64, "BLOCK": 1024}, "choices:i32"
        ),
        "experts sort": _case(
            grouped.sort_kernel, "experts_ptr:i32 counts_ptr:i32 order_ptr:i32 tiles_ptr:i32", gpu,
            {"FIRST": 64, "COUNT": 128, "BLOCK_COUNT": 128, "BLOCK_M": 16, "BLOCK": 1024},
            "choices:i32 most_tiles:i32",
        ),
        "experts combine": _case(
            experts.combine_kernel,
            "parts_ptr:bf16 weights_ptr:fp32 out_ptr:fp32 experts_ptr:i32 bias_ptr:fp32", gpu,
            {"FIRST": 64, "COUNT": 128, "TOP_K": 8, "ACCUMULATE": True, "WIDTH": 2048, "BLOCK": 1024},
        ),
        "experts terms": _case(
            experts.terms_kernel, "parts_ptr:bf16 terms_ptr:fp32 experts_ptr:i32 bias_ptr:fp32", gpu,
            {"FIRST": 64, "COUNT": 128, "WIDTH": 2048, "BLOCK": 1024},
        ),
        "experts sum": _case(
            experts.combine_kernel, "parts_ptr:fp32 weights_ptr:fp32 out_ptr:fp32 experts_ptr: bias_ptr:", gpu,
            {"FIRST": 0, "COUNT": 0, "TOP_K": 8, "ACCUMULATE": True, "WIDTH": 2048, "BLOCK": 1024},
        ),
        "experts bias": _case(
            experts.add_bias_kernel, "out_ptr:bf16 order_ptr:i32 experts_ptr:i32 bias_ptr:fp32", gpu,
            {"FIRST": 64, "COUNT": 128, "WIDTH": 4096, "BLOCK": 1024},
        ),
    }  # fmt: skip


def lora_cases(gpu: Target, rank: int = 64) -> dict[str, Case]:
    """Adapters of Llama-3 8B behind the product of queries, keys and values, and behind the last one of a layer."""
    joined, alone = ((0, 4096), (4096, 1024), (5120, 1024)), ((0, 4096),)
    made = {}
    for name, width, parts, out in (("qkv", 4096, joined, "bf16"), ("down", 14336, alone, "fp32")):
        slots = SimpleNamespace(parts=parts, max_rank=rank)
        op: Any = SimpleNamespace(x=torch.empty(1, width, dtype=torch.bfloat16, device="meta"), slots=slots)
        lists = "tiles_ptr:i32 order_ptr:i32 table_ptr:i64 "
        for kind in ("few", "many", "always"):
            shape: lora.LoraShape = getattr(lora, kind.upper())
            cases = {
                "shrink": _case(
                    lora.shrink_kernel, f"x_ptr:bf16 {lists} sums_ptr:fp32", gpu, lora.shrink_constants(op, shape),
                    "rows:i32 tiles:i32 stride_x:i32", shape.warps, shape.stages,
                ),
                "expand": _case(
                    lora.expand_kernel, f"sums_ptr:fp32 {lists} blocks_ptr:i32 out_ptr:{out}", gpu,
                    lora.expand_constants(op, shape, gpu), "rows:i32 tiles:i32 stride_out:i32", shape.warps,
                    shape.stages,
                ),
            }  # fmt: skip
            for kernel, case in cases.items():
                strides = (*case.divisible, *(each for each in case.signature if "stride" in each))
                made[f"lora {kernel} {name} {kind}"] = replace(case, divisible=strides)
    return made


def family_cases(gpu: Target) -> dict[str, Case]:
    """What families other than Llama's need."""
    capped = attention_cases(gpu, "bf16", 4096, 96, softcap=50.0)
    made = {f"{name} capped": case for name, case in capped.items() if "merge" not in name} | {
        "norm layer": norm_case(gpu, bias="fp32", CENTER=True),
        "norm accumulated": norm_case(gpu, ACCUMULATE=True),
        "rope_kv part": rope_case(gpu, "bf16", turned=32, scale="fp32"),
        "activation gelu": activation_case(gpu, function="gelu", gated=False),
        "sigmoid_mul": _case(
            pointwise.sigmoid_mul_kernel, "gate_ptr:bf16 out_ptr:bf16", gpu,
            {"GATES": 1, "WIDTH": 1408, "BLOCK": pointwise.BLOCK},
        ),
        "soft_cap": _case(
            pointwise.soft_cap_kernel, "x_ptr:fp32", gpu, {"CAP": 30.0, "WIDTH": 256000, "BLOCK": pointwise.BLOCK}
        ),
        "gather added": gather_case(gpu, accumulate=True),
        **mixture_cases(gpu),
        **lora_cases(gpu),
        **packed_cases(gpu),
        **{f"{name} 4 bits": case for name, case in attention_cases(gpu, "u8").items() if "merge" not in name},
    }  # fmt: skip
    return {f"{name} {gpu.architecture}": case for name, case in made.items()}


def invariant_case(gpu: Target, cache: str) -> Case:
    return attention_cases(gpu, cache, invariant=True)["attention decodes"]


def amd_cases() -> dict[str, Case]:
    """What ``cases`` has, for AMD, with codes of integers too."""
    found: dict[str, Case] = {}
    for gpu in map(described, AMD):
        found |= cases_of(gpu, "fp16")
        for cache in ("i8", "fp8e4nv") if "fp8" in gpu.features else ("i8",):
            made = attention_cases(gpu, cache) | {"rope_kv": rope_case(gpu, cache)}
            found |= {f"{name} {cache} {gpu.architecture}": case for name, case in made.items()}
    return found | family_cases(described("gfx950"))


def every_family_case() -> dict[str, Case]:
    return {name: case for gpu in ARCHITECTURES for name, case in family_cases(gpu).items()}


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for gpu in ARCHITECTURES:
        found |= cases_of(gpu, "fp8e4nv" if "fp8" in gpu.features else "fp16")
    hopper = described("sm_90")
    found["attention decodes invariant sm_90"] = invariant_case(hopper, "fp8e4nv")
    # What takes the most shared memory.
    found["tiles of float32 sm_90"] = attention_cases(hopper, "fp8e4nv", activations="fp32")["attention tiles"]
    return found | family_cases(hopper)


def decode_cases() -> dict[str, Case]:
    """Decodes over every cache with heads of several widths, for GPUs with most and with little shared memory."""
    return {
        f"{cache} {dim} {gpu.architecture}": attention_cases(gpu, cache, dim=dim)["attention decodes"]
        for gpu in map(described, ("sm_89", "sm_90")) for cache in ("bf16", "fp8e4nv", "i8", "u8")
        for dim in (64, 128, 256)
    }  # fmt: skip


def every_case() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for gpu in ARCHITECTURES:
        found |= family_cases(gpu)
        for cache in CACHES:
            if cache == "fp8e4nv" and "fp8" not in gpu.features:
                continue
            name = f"{cache} {gpu.architecture}"
            found[f"rope_kv {name}"] = rope_case(gpu, cache, "", "")
            found[f"rope_kv still {name}"] = rope_case(gpu, cache, "", "", 0)
            for dim, window, heads, cap in (
                (64, 0, 24, 0.0), (80, 4096, 32, 0.0), (96, 0, 32, 0.0), (128, 0, 64, 0.0), (256, 0, 16, 0.0),
                (256, 4096, 16, 50.0),
            ):  # fmt: skip
                if dim % PACKED_HEADS and cache == "u8":
                    continue
                made = attention_cases(gpu, cache, window, dim, heads, softcap=cap)
                found |= {f"{kernel} {dim} {f'capped {name}' if cap else name}": case for kernel, case in made.items()}
            # Falcon 7B and StarCoder, whose heads share one of keys: too many for codes of 4 bits.
            for dim, heads in () if cache == "u8" else ((64, 71), (128, 48)):
                made = attention_cases(gpu, cache, 0, dim, heads, 1)
                found |= {f"{kernel} {dim} shared {name}": case for kernel, case in made.items()}
            found[f"attention decodes invariant {name}"] = invariant_case(gpu, cache)
        for dim in (64, 96, 256):
            found |= {f"{name} {dim} {gpu.architecture}": case for name, case in packed_cases(gpu, dim).items()}
        for width in (512, 8192, 16384):
            for codes in ("", "i8", "fp8e4nv") if "fp8" in gpu.features else ("", "i8"):
                name = f"{codes or 'alone'} {width} {gpu.architecture}"
                found[f"norm {name}"] = norm_case(gpu, codes, width)
                found[f"norm layer {name}"] = norm_case(gpu, codes, width, "fp32", CENTER=True)
                if codes:
                    found[f"activation {name}"] = activation_case(gpu, codes, width)
        for function, gated in itertools.product(get_args(Function), (False, True)):
            name = f"activation {function} {'gated' if gated else 'plain'} {gpu.architecture}"
            found[name] = activation_case(gpu, function=function, gated=gated)
        found[f"cast {gpu.architecture}"] = gather_case(gpu, "")
    return found
