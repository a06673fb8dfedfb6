"""What the ahead-of-time tests of the kernels beside the linear products compile: ``cases`` in the default suite,
``every_case`` in CI.

Loaded by ``aot.py`` as a program, and by the tests for the names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton

from qserve.kernels.triton import (
    argmax,
    attention,
    embed,
    fill,
    gather,
    inputs,
    log_softmax,
    rms_norm,
    rope_kv,
    silu_mul,
)
from qserve.kernels.triton.target import AMD, Target, described
from tests.kernels.triton.aot import Case

ARCHITECTURES = tuple(map(described, ("sm_80", "sm_89", "sm_90", "sm_100")))
CACHES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "i8": torch.int8,
}


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


def attention_op(cache: str, window: int = 0, dim: int = 128, heads: int = 32, kv_heads: int = 8) -> Any:
    """As much of an operation as decides how its kernels are compiled."""
    return SimpleNamespace(
        heads=heads, kv_heads=kv_heads, head_dim=dim, window=window, k_cache=torch.empty(0, dtype=CACHES[cache]),
        qkv=torch.empty(0, dtype=torch.bfloat16),
    )  # fmt: skip


def attention_cases(
    gpu: Target, cache: str, window: int = 0, dim: int = 128, heads: int = 32, kv_heads: int = 8,
    *, invariant: bool = False,
) -> dict[str, Case]:  # fmt: skip
    """The kernels of attention by name, as the launchers would specialize them."""
    scales = "fp32" if cache in ("fp8e4nv", "i8") else ""
    op = attention_op(cache, window, dim, heads, kv_heads)
    common = f"qkv_ptr:bf16 out_ptr:bf16 k_ptr:{cache} k_scale_ptr:{scales} v_scale_ptr:{scales} positions_ptr:i32 "
    common += "staged_ptr:i32 "
    tile, decode = attention.tile_shape(op, gpu.warp), attention.decode_shape(op)
    if invariant:
        decode = tile
    values = {shape: f"v_ptr:{'i16' if shape.pairs else cache} " for shape in (tile, decode)}
    ptx = {"PTX": "ptx" in gpu.features}
    known = attention.constants(op, decode) | ptx
    merged = {name: known[name] for name in ("HEADS", "KV_HEADS", "DIM", "BLOCK_DIM", "CHUNK", "WINDOW")}
    return {
        "attention tiles": _case(
            attention.tile_kernel, common + values[tile] + "tiles_ptr:i32", gpu, attention.constants(op, tile) | ptx,
            "scale:fp32", tile.warps, tile.stages,
        ),
        "attention decodes": _case(
            attention.decode_kernel,
            common + values[decode] + "partial_ptr:fp32 softmax_ptr:fp32 units_ptr:i32 count_ptr:i32",
            gpu, known, "scale:fp32", decode.warps, decode.stages,
        ),
        "attention merge": _case(
            attention.merge_kernel,
            f"out_ptr:bf16 partial_ptr:fp32 softmax_ptr:fp32 v_scale_ptr:{scales} decodes_ptr:i32 positions_ptr:i32",
            gpu, {**merged, "ROWS": triton.next_power_of_2(heads // kv_heads)}, stages=4,
        ),
    }  # fmt: skip


def rope_case(gpu: Target, cache: str, norm: str = "fp32", center: str = "fp32") -> Case:
    scales = "fp32" if cache in ("fp8e4nv", "i8") else ""
    pointers = (
        f"qkv_ptr:bf16 cosine_ptr:fp32 sine_ptr:fp32 q_norm_ptr:{norm} k_norm_ptr:{norm} k_center_ptr:{center} "
        f"k_scale_ptr:{scales} v_scale_ptr:{scales} k_cache_ptr:{cache} v_cache_ptr:{cache} positions_ptr:i32 "
        "slots_ptr:i32"
    )
    known = {
        "HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK_HALF": 64, "PAGE": 16, "TOKENS": rope_kv.TOKENS,
        "ENCODING": {"i8": 1, "fp8e4nv": 2}.get(cache, 0),
    }  # fmt: skip
    return _case(rope_kv.rope_kv_kernel, pointers, gpu, known, "tokens:i32 eps:fp32", warps=1)


def rounding(codes: str) -> tuple[str, str, dict[str, Any]]:
    """Pointers, numbers and constants of a kernel that rounds its row to ``codes``, or to nothing."""
    pointers = f"codes_ptr:{codes} scales_ptr:{'fp32' if codes else ''}"
    return pointers, "stride_codes:i32 input_scale:fp32", {"STATIC": False, "LIMIT": 127.0 if codes == "i8" else 448.0}


def norm_case(gpu: Target, codes: str = "", width: int = 4096) -> Case:
    pointers, numbers, known = rounding(codes)
    block = triton.next_power_of_2(width)
    return _case(
        rms_norm.rms_norm_kernel, f"x_ptr:fp32 weight_ptr:fp32 out_ptr:bf16 {pointers}", gpu,
        known | {"WIDTH": width, "BLOCK": block}, f"eps:fp32 {numbers}", inputs.row_warps(block),
    )  # fmt: skip


def silu_case(gpu: Target, codes: str = "", width: int = 14336) -> Case:
    pointers, numbers, known = rounding(codes)
    block = triton.next_power_of_2(width) if codes else silu_mul.BLOCK
    return _case(
        silu_mul.silu_mul_kernel, f"gate_up_ptr:bf16 out_ptr:bf16 {pointers}", gpu,
        known | {"WIDTH": width, "BLOCK": block}, numbers, inputs.row_warps(block),
    )  # fmt: skip


def plain_cases(gpu: Target) -> dict[str, Case]:
    """The kernels that have one configuration, at the width of Llama-3-8B."""
    codes = "fp8e4nv" if "fp8" in gpu.features else "i8"
    vocabulary = {"WIDTH": 128256, "BLOCK": 4096}
    packed = {"SCALE": 1.0, "ZERO": 8, "GROUP": 64, "GROUPS": 64, "WIDTH": 4096, "BLOCK": embed.BLOCK}
    return {
        "rms_norm": norm_case(gpu),
        "rms_norm rounded": norm_case(gpu, codes),
        "silu_mul": silu_case(gpu),
        "silu_mul rounded": silu_case(gpu, codes),
        "gather": _case(
            gather.gather_kernel, "x_ptr:bf16 rows_ptr:i32 out_ptr:fp32", gpu,
            {"SCALE": 1.0, "WIDTH": 4096, "BLOCK": gather.BLOCK},
        ),
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


def amd_cases() -> dict[str, Case]:
    """What ``cases`` has, for AMD, with codes of integers too."""
    found: dict[str, Case] = {}
    for gpu in map(described, AMD):
        found |= cases_of(gpu, "fp16")
        for cache in ("i8", "fp8e4nv") if "fp8" in gpu.features else ("i8",):
            made = attention_cases(gpu, cache) | {"rope_kv": rope_case(gpu, cache)}
            found |= {f"{name} {cache} {gpu.architecture}": case for name, case in made.items()}
    return found


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for gpu in ARCHITECTURES:
        found |= cases_of(gpu, "fp8e4nv" if "fp8" in gpu.features else "fp16")
    return found


def decode_cases() -> dict[str, Case]:
    """Decodes over every cache with heads of several widths, for GPUs with most and with little shared memory."""
    return {
        f"{cache} {dim} {gpu.architecture}": attention_cases(gpu, cache, dim=dim)["attention decodes"]
        for gpu in map(described, ("sm_89", "sm_90")) for cache in ("bf16", "fp8e4nv", "i8") for dim in (64, 128, 256)
    }  # fmt: skip


def every_case() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for gpu in ARCHITECTURES:
        for cache in CACHES:
            if cache == "fp8e4nv" and "fp8" not in gpu.features:
                continue
            name = f"{cache} {gpu.architecture}"
            found[f"rope_kv {name}"] = rope_case(gpu, cache, "", "")
            for dim, window, heads in ((64, 0, 24), (80, 4096, 32), (128, 0, 64), (256, 0, 16)):
                made = attention_cases(gpu, cache, window, dim, heads)
                found |= {f"{kernel} {dim} {name}": case for kernel, case in made.items()}
            invariant = attention_cases(gpu, cache, invariant=True)["attention decodes"]
            found[f"attention decodes invariant {name}"] = invariant
        for width in (512, 8192, 16384):
            for codes in ("", "i8", "fp8e4nv") if "fp8" in gpu.features else ("", "i8"):
                name = f"{codes or 'alone'} {width} {gpu.architecture}"
                found[f"rms_norm {name}"] = norm_case(gpu, codes, width)
                if codes:
                    found[f"silu_mul {name}"] = silu_case(gpu, codes, width)
    return found
