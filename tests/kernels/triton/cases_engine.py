"""What is compiled ahead of time of the kernels beside the linear products: one configuration per kernel and GPU.

Run by ``aot.compile_file`` in a process that does not interpret.
"""

from __future__ import annotations

import triton
import triton.language as tl
from aot import Case

from qserve.kernels.triton import attention
from qserve.kernels.triton.attention import CHUNK

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0)]
"""Of an A100, an L40S, an H200 and a B200."""
E8 = (8, 9)


def _case(kernel, pointers: dict[str, str], numbers: dict[str, str], constexprs: dict, capability, warps=4, stages=3):
    constexprs = {**constexprs, **{name: None for name, kind in pointers.items() if not kind}}
    signature = {**{name: kind for name, kind in pointers.items() if kind}, **numbers}
    return Case(kernel, signature, constexprs, capability, warps, stages, tuple(n for n, k in pointers.items() if k))


def _attention(cache: str, window: int, dim: int = 128) -> tuple[dict[str, str], dict]:
    scales = "*fp32" if cache in ("*fp8e4nv", "*i8") else ""
    pointers = {
        "qkv_ptr": "*bf16", "out_ptr": "*bf16", "k_ptr": cache, "v_ptr": cache, "k_scale_ptr": scales,
        "v_scale_ptr": scales, "positions_ptr": "*i32", "staged_ptr": "*i32",
    }  # fmt: skip
    known = {
        "HEADS": 32, "KV_HEADS": 8, "DIM": dim, "BLOCK_DIM": triton.next_power_of_2(dim), "CHUNK": CHUNK,
        "WINDOW": window, "PAGE": 16, "COMPUTE": tl.bfloat16 if cache == "*bf16" else tl.float16,
        "NAN_CODE": cache == "*i8",
    }  # fmt: skip
    return pointers, known


def cases() -> dict[str, Case]:
    found = {}
    for capability in CAPABILITIES:
        name = f"sm_{capability[0]}{capability[1]}"
        for cache in ("*fp16", "*fp8e4nv"):
            if cache == "*fp8e4nv" and capability < E8:
                continue
            pointers, known = _attention(cache, 0)
            found[f"tile {cache} {name}"] = _case(
                attention.tile_kernel, {**pointers, "tiles_ptr": "*i32"}, {"scale": "fp32"},
                {**known, "ROWS": 64, "KEYS": 64}, capability, 4, 2,
            )  # fmt: skip
            found[f"decode {cache} {name}"] = _case(
                attention.decode_kernel,
                {**pointers, "partial_ptr": "*fp32", "softmax_ptr": "*fp32", "units_ptr": "*i32", "count_ptr": "*i32"},
                {"scale": "fp32"}, {**known, "ROWS": 16, "KEYS": 64}, capability, 4, 3,
            )  # fmt: skip
    return found
