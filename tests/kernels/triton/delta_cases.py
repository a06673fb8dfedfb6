"""What the ahead-of-time tests of gated delta nets compile: ``cases`` in the default suite, ``every_case`` in CI.

Loaded by ``aot.py`` as a program, and by the tests for the shapes.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from qserve.kernels.triton import causal_conv, delta_chunks, gated_delta, gated_norm
from qserve.kernels.triton.target import Target, described
from tests.kernels.triton.aot import Case
from tests.kernels.triton.engine_cases import ARCHITECTURES, CACHES, _case


def delta_cases(
    gpu: Target, key_heads: int = 16, heads: int = 32, dim: int = 128, values: int = 128, dtype: str = "bf16"
) -> dict[str, Case]:
    """The kernels by name, as the launchers would specialize them."""
    channels = 2 * key_heads * dim + heads * values
    conv: Any = SimpleNamespace(channels=channels, width=4)
    op: Any = SimpleNamespace(
        key_heads=key_heads, heads=heads, key_dim=dim, value_dim=values, x=torch.empty(0, dtype=CACHES[dtype])
    )
    pointers = f"x_ptr:{dtype} runs_ptr:i32 positions_ptr:i32 saves_ptr:i32 state_ptr:fp32 "
    solved = f"inverse_ptr:{dtype} scores_ptr:{dtype} factors_ptr:fp32 "
    chunks = f"x_ptr:{dtype} factors_ptr:fp32 chunks_ptr:i32 "
    rates = "rate_ptr:fp32 bias_ptr:fp32 "
    made = {
        f"convolution {'short' if decode else 'long'}": _case(
            causal_conv.causal_conv_kernel, pointers + "weight_ptr:fp32", gpu,
            causal_conv.constants(conv, decode=decode), "x_stride:i32",
        )
        for decode in (True, False)
    }  # fmt: skip
    made["rule"] = _case(
        gated_delta.delta_rule_kernel, pointers + rates + "out_ptr:fp32", gpu, gated_delta.constants(op), "scale:fp32"
    )
    made["solve"] = _case(
        delta_chunks.delta_solve_kernel, chunks + rates + f"inverse_ptr:{dtype}", gpu,
        delta_chunks.solve_constants(op), "plane:i32", delta_chunks.WARPS,
    )  # fmt: skip
    made["scores"] = _case(
        delta_chunks.delta_scores_kernel, chunks + f"scores_ptr:{dtype}", gpu, delta_chunks.scores_constants(op),
        "plane:i32 scale:fp32", delta_chunks.WARPS,
    )  # fmt: skip
    made["fold"] = _case(
        delta_chunks.delta_fold_kernel, pointers + solved + "out_ptr:fp32", gpu, delta_chunks.fold_constants(op),
        "plane:i32", delta_chunks.FOLD_THREADS // gpu.warp, delta_chunks.fold_stages(gpu),
    )  # fmt: skip
    made["norm"] = _case(
        gated_norm.gated_norm_kernel, f"x_ptr:fp32 gate_ptr:{dtype} weight_ptr:fp32 out_ptr:{dtype}", gpu,
        gated_norm.constants(heads, values), "gate_stride:i32 eps:fp32",
    )  # fmt: skip
    name = f"{heads} {dim} {values} {dtype} {gpu.architecture}"
    return {f"{kernel} {name}": _aligned(case) for kernel, case in made.items()}


def _aligned(case: Case) -> Case:
    """Rows and planes lie at multiples of 16 numbers, which Triton sees as it launches."""
    strides = (name for name in case.signature if name.endswith("stride") or name == "plane")
    return replace(case, divisible=(*case.divisible, *strides))


def cases() -> dict[str, Case]:
    """Qwen3-Next on Hopper."""
    return delta_cases(described("sm_90"))


def every_case() -> dict[str, Case]:
    """Qwen3-Next, Qwen3.5 of 2 and of 27 billion weights, and heads of other widths."""
    found: dict[str, Case] = {}
    for gpu in ARCHITECTURES:
        found |= delta_cases(gpu) | delta_cases(gpu, 16, 16) | delta_cases(gpu, 16, 48) | delta_cases(gpu, dtype="fp16")
        found |= delta_cases(gpu, 4, 8, 64, 64) | delta_cases(gpu, 2, 6, 96, 80)
    return found


def amd_cases() -> dict[str, Case]:
    return delta_cases(described("gfx950")) | delta_cases(described("gfx942"))
