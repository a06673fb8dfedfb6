"""What the ahead-of-time tests of latent attention compile: ``cases`` in the default suite, ``every_case`` in CI.

Loaded by ``aot.py`` as a program, and by the tests for the shapes.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from qserve.kernels.triton import head_linear, latent_attention, latent_kv
from qserve.kernels.triton.target import AMD, Target, described
from tests.kernels.triton.aot import Case
from tests.kernels.triton.engine_cases import ARCHITECTURES, _case


def latent_cases(gpu: Target, heads: int, rank: int = 512, rope: int = 64, nope: int = 128) -> dict[str, Case]:
    """The kernels by name, as the launchers would specialize them, in bfloat16."""
    cache = torch.empty(0, 16, rank + rope, dtype=torch.bfloat16)
    op: Any = SimpleNamespace(heads=heads, rank=rank, width=rank + rope, cache=cache)
    pointers = "q_ptr:bf16 out_ptr:bf16 cache_ptr:bf16 positions_ptr:i32 staged_ptr:i32 "
    partial = "partial_ptr:fp32 softmax_ptr:fp32 "
    made = {}
    decode = latent_attention.decode_shape(op, gpu.shared_bytes, gpu.warp)
    always = latent_attention.tile_shape(op, gpu.shared_bytes, gpu.warp, folded=True)
    for name, shape in (("", decode), (" invariant", always)):
        made[f"decodes{name}"] = _case(
            latent_attention.latent_decode_kernel, pointers + partial + "units_ptr:i32 count_ptr:i32", gpu,
            latent_attention.constants(op, shape), "scale:fp32", shape.warps, shape.stages,
        )  # fmt: skip
    for name, shape in (("", latent_attention.tile_shape(op, gpu.shared_bytes, gpu.warp)), (" invariant", always)):
        made[f"tiles{name}"] = _case(
            latent_attention.latent_tile_kernel, pointers + "tiles_ptr:i32", gpu,
            latent_attention.constants(op, shape) | {"FOLDED": shape.folded}, "scale:fp32", shape.warps, shape.stages,
        )  # fmt: skip
    made["merge"] = _case(
        latent_attention.latent_merge_kernel, "out_ptr:bf16 " + partial + "decodes_ptr:i32 positions_ptr:i32", gpu,
        latent_attention.merge_constants(op),
    )  # fmt: skip
    made["write"] = _case(
        latent_kv.latent_kv_kernel,
        "kv_ptr:fp32 norm_ptr:fp32 q_ptr:bf16 out_ptr:bf16 cosine_ptr:fp32 sine_ptr:fp32 cache_ptr:bf16 "
        "positions_ptr:i32 slots_ptr:i32", gpu,
        {"RANK": rank, "HALF": rope // 2, "BLOCK_RANK": rank, "BLOCK_HALF": rope // 2, "TOKENS": latent_kv.TOKENS},
        "tokens:i32 eps:fp32 q_stride:i32 q_head:i32 out_stride:i32 out_head:i32", 1,
    )  # fmt: skip
    for out, inp in ((rank, nope), (nope, rank)):
        product: Any = SimpleNamespace(weight=torch.empty(heads, out, inp, device="meta"))
        for name in ("FEW", "MANY", "ALWAYS"):
            tile = getattr(head_linear, name)
            made[f"product {name.lower()} {out}"] = _case(
                head_linear.head_linear_kernel, "x_ptr:bf16 weight_ptr:bf16 out_ptr:bf16", gpu,
                head_linear.constants(product, tile),
                "rows:i32 stride_x:i32 head_x:i32 stride_out:i32 head_out:i32", tile.warps, tile.stages,
            )  # fmt: skip
    return {f"{name} {heads} {gpu.architecture}": _aligned(case) for name, case in made.items()}


def _aligned(case: Case) -> Case:
    """Rows and heads lie at multiples of 16 numbers, which Triton sees as it launches."""
    strides = (name for name in case.signature if "stride" in name or "head_" in name or name.endswith("_head"))
    return replace(case, divisible=(*case.divisible, *strides))


def cases() -> dict[str, Case]:
    """DeepSeek-V3 on Hopper."""
    return latent_cases(described("sm_90"), 128)


def every_case() -> dict[str, Case]:
    """DeepSeek-V3, DeepSeek-V2-Lite, GLM-4.7-Flash and MiniCPM3."""
    found: dict[str, Case] = {}
    for gpu in ARCHITECTURES:
        found |= latent_cases(gpu, 128) | latent_cases(gpu, 16)
        found |= latent_cases(gpu, 20, nope=192) | latent_cases(gpu, 40, 256, 32, 64)
    return found


def amd_cases() -> dict[str, Case]:
    """DeepSeek-V3 on gfx950; MiniCPM3 on both, whose attention gfx942 has the shared memory for."""
    found = latent_cases(described("gfx950"), 128)
    for gpu in map(described, AMD):
        found |= latent_cases(gpu, 40, 256, 32, 64)
    return found
