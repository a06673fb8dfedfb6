"""What the ahead-of-time tests of the linear products compile: ``cases`` in the default suite, ``every_case`` in CI.

Loaded by ``aot.py`` as a program, and by the tests for the names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from qserve.kernels.triton import dequantize, eight_bit, persistent, trellis, weight_only
from qserve.kernels.triton.grouped import NOT_GROUPED
from qserve.kernels.triton.inputs import (
    gather_columns_kernel,
    round_groups_kernel,
    round_rows_kernel,
    row_block,
    row_warps,
)
from qserve.kernels.triton.prepack import SLICES, _shape
from qserve.kernels.triton.target import AMD, Target, described
from qserve.kernels.triton.tuning.configs import Config
from qserve.kernels.triton.tuning.tuned import DATA
from tests.kernels.triton.aot import Case

PLAIN = {"tiles": None, "order": None, **NOT_GROUPED}
ARCHITECTURES = tuple(map(described, ("sm_80", "sm_89", "sm_90", "sm_100")))
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "fp8": "fp8e4nv", "int8": "i8"}
FEW, MANY = 1, 1024
"""Rows of a decode and of a prefill."""


def _case(
    kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], gpu: Target, config: Config
) -> Case:
    sizes = ("n", "k", "stride_x", "stride_out", "stride_codes", "padded_n")
    divisible = tuple(name for name, kind in signature.items() if kind.startswith("*") or name in sizes)
    return Case(kernel, signature, constexprs, gpu.architecture, config.warps, config.stages, divisible)


def weight_only_case(
    gpu: Target, rows: int, bits: int = 4, group: int = 128, kind: str = "pairs",
    dtype: str = "fp16", even_k: bool = True, accumulate: bool = False, config: Config | None = None,
    fp4: bool = False,
) -> Case:  # fmt: skip
    """``kind`` of scales, or "both" where scales and zero points are float32. None: the default of ``rows``."""
    config, planes = config or weight_only.default(rows, bits, group, gpu), 16 // bits
    size = _shape(group or 4096, 32 if group else 1, 4096, planes)[0] if bits < 16 else SLICES[0]
    assert kind != "pairs" or planes * size // group in (2, 4)
    floats = kind in ("float", "both")
    signature = {
        "x": "*" + dtype, "weight": "*i16" if bits < 16 else "*" + dtype,
        "scales": "*fp32" if floats else "*i32", "zeros": "*fp32", "bias": "*" + dtype, "out": "*" + dtype,
        "partial": "*fp32", "arrived": "*i32",
        "rows": "i32", "n": "i32", "k": "i32", "stride_x": "i32", "stride_out": "i32", "padded_n": "i32",
        "blocks": "i32", "splits": "i32",
    }  # fmt: skip
    constexprs = {
        "ZERO": -2 if fp4 else -1 if kind in ("zeros", "both") else 1 << (bits - 1), "BITS": bits, "SLICE": size,
        "GROUP": group,
        "SCALES": "float" if floats else kind, "HAS_BIAS": False, "ACCUMULATE": accumulate, "EVEN_K": even_k,
        "SWAP": config.swap, "SPLIT": config.splits != 1, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "STAGES": config.stages, "PTX": "ptx" in gpu.features,
    }  # fmt: skip
    return _case(weight_only.weight_only_kernel, signature, constexprs | PLAIN, gpu, config)


def trellis_case(
    gpu: Target, rows: int, bits: int, group: int = 64, dtype: str = "bf16", even_k: bool = True,
    accumulate: bool = False, config: Config | None = None,
) -> Case:  # fmt: skip
    config = config or trellis.default(rows, gpu)
    signature = {
        "x": "*" + dtype, "words": "*i16", "places": "*i32", "scales": "*fp32", "bias": "*" + dtype, "out": "*" + dtype,
        "partial": "*fp32", "arrived": "*i32", "rows": "i32", "n": "i32", "k": "i32", "stride_x": "i32",
        "stride_out": "i32", "padded_n": "i32", "block_rows": "i32", "blocks": "i32", "splits": "i32",
    }  # fmt: skip
    constexprs = {
        "BITS": bits, "SLICE": _shape(group or 4096, 32 if group else 1, 4096, 1)[0], "GROUP": group, "HAS_BIAS": False,
        "ACCUMULATE": accumulate, "EVEN_K": even_k, "SPLIT": config.splits != 1, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "STAGES": config.stages, "PTX": "ptx" in gpu.features,
    }  # fmt: skip
    return _case(trellis.trellis_kernel, signature, constexprs | PLAIN, gpu, config)


def dequantize_trellis_case(gpu: Target, bits: int, group: int = 64, dtype: str = "bf16") -> Case:
    signature = {
        "words": "*i16", "places": "*i32", "scales": "*fp32", "out": "*" + dtype, "padded_n": "i32",
        "block_rows": "i32", "first": "i32", "last": "i32", "stride_out": "i32",
    }  # fmt: skip
    constexprs = {
        "BITS": bits, "SLICE": _shape(group or 4096, 32 if group else 1, 4096, 1)[0], "GROUP": group, "BLOCK_N": 256,
        "PTX": "ptx" in gpu.features,
    }  # fmt: skip
    return _case(trellis.dequantize_trellis_kernel, signature, constexprs, gpu, dequantize.CONFIG)


def eight_bit_case(
    gpu: Target, rows: int, kind: str, group: int = 0, x_group: int = 0, out: str = "fp16",
    config: Config | None = None,
) -> Case:  # fmt: skip
    config = config or eight_bit.default(rows, group + x_group > 0, gpu)
    signature = {
        "x": "*" + kind, "x_scales": "*fp32", "weight": "*" + kind, "scales": "*fp32", "bias": "*" + out,
        "out": "*" + out, "partial": "*fp32", "arrived": "*i32", "rows": "i32", "n": "i32", "stride_x": "i32",
        "stride_out": "i32", "padded_n": "i32", "blocks": "i32", "splits": "i32", "x_groups": "i32",
    }  # fmt: skip
    constexprs = {
        "GROUP": group, "X_GROUP": x_group, "HAS_BIAS": False, "ACCUMULATE": False, "SPLIT": config.splits != 1,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": min(128, group or 128, x_group or 128),
        "STAGES": config.stages,
    }  # fmt: skip
    return _case(eight_bit.eight_bit_kernel, signature, constexprs | PLAIN, gpu, config)


def grouped_case(made: Case, *, sorted_x: bool = False) -> Case:
    """``made`` for the 128 experts of Qwen3-30B-A3B: gate and up, or down where x is sorted."""
    absent = {"partial": None, "arrived": None}
    known = {"EACH": 2048 if sorted_x else 1536, "TOP_K": 8, "SORTED_X": sorted_x, "SPLIT": False, "ACCUMULATE": False}
    constexprs = {name: value for name, value in made.constexprs.items() if name not in ("tiles", "order")}
    signature = {name: kind for name, kind in made.signature.items() if name not in absent}
    return replace(
        made, signature=signature | {"tiles": "*i32", "order": "*i32"}, constexprs=constexprs | absent | known,
        divisible=(*(name for name in made.divisible if name not in absent), "tiles", "order"),
    )  # fmt: skip


def expert_cases(gpu: Target, rows: int) -> dict[str, Case]:
    """The products of experts with about ``rows`` rows each."""
    made = {
        "w4a16": weight_only_case(gpu, rows, dtype="bf16"),
        "dense": weight_only_case(gpu, rows, 16, 0, "float", "bf16"),
        "trellis": trellis_case(gpu, rows, 3),
        "int8": eight_bit_case(gpu, rows, "i8", out="bf16"),
    }  # fmt: skip
    if "fp8" in gpu.features:
        made["fp8"] = eight_bit_case(gpu, rows, "fp8e4nv", out="bf16")
        made["fp8 blocks"] = eight_bit_case(gpu, rows, "fp8e4nv", 128, 128, out="bf16")
    return {
        f"experts {name} {'down' if down else 'up'} rows {rows} {gpu.architecture}": grouped_case(case, sorted_x=down)
        for name, case in made.items() for down in (False, True)
    }  # fmt: skip


def every_expert_case() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for gpu, rows in product(ARCHITECTURES, (16, 32, 64)):
        found |= expert_cases(gpu, rows)
    return found


def persistent_case(
    gpu: Target, config: Config, kind: str, group: int = 0, x_group: int = 0, out: str = "bf16",
    accumulate: bool = False,
) -> Case:  # fmt: skip
    part = persistent.part_n(config, group + x_group > 0)
    signature = {
        "x": f"tensordesc<{kind}[{config.block_m},{persistent.BLOCK_K}]>",
        "weight": f"tensordesc<{kind}[{part},{persistent.BLOCK_K}]>",
        "x_scales": "*fp32", "scales": "*fp32", "bias": "*" + out, "out": "*" + out, "rows": "i32", "n": "i32",
        "padded_n": "i32", "blocks": "i32", "stride_out": "i32", "x_groups": "i32", "programs": "i32",
    }  # fmt: skip
    constexprs = {
        "GROUP": group, "X_GROUP": x_group, "HAS_BIAS": accumulate, "ACCUMULATE": accumulate,
        "EXACT": persistent.exact(kind == "i8", gpu),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PART_N": part, "COLUMN": persistent.COLUMN,
    }  # fmt: skip
    made = _case(persistent.persistent_kernel, signature, constexprs, gpu, config)
    return replace(made, maxnreg=persistent.most_registers(config, group + x_group > 0))


def persistent_cases(gpu: Target) -> dict[str, Case]:
    """Every configuration of every way it is specialized."""
    found = {}
    for kind in ("fp8e4nv", "i8") if "wgmma" in gpu.features else ("fp8e4nv",):
        for group, x_group in ((0, 0), (128, 128), (128, 0), (0, 128)) if kind == "fp8e4nv" else ((0, 0),):
            for config in persistent.configs(256, group + x_group > 0):
                for out, accumulate in (("bf16", False), ("fp32", True)):
                    tile = f"{config.block_m}x{config.block_n} {config.stages} stages"
                    name = f"persistent {kind} g{group},{x_group} {tile} {out} {gpu.architecture}"
                    found[name] = persistent_case(gpu, config, kind, group, x_group, out, accumulate)
    return found


def dequantize_case(
    gpu: Target, bits: int = 4, group: int = 128, kind: str = "pairs", dtype: str = "bf16"
) -> Case:
    floats = kind in ("float", "both")
    signature = {
        "weight": "*i16", "scales": "*fp32" if floats else "*i32", "zeros": "*fp32", "out": "*" + dtype,
        "padded_n": "i32", "first": "i32", "last": "i32", "stride_out": "i32",
    }  # fmt: skip
    constexprs = {
        "ZERO": -1 if kind in ("zeros", "both") else 1 << (bits - 1), "BITS": bits, "GROUP": group,
        "SLICE": _shape(group or 4096, 32 if group else 1, 4096, 16 // bits)[0],
        "SCALES": "float" if floats else kind, "BLOCK_N": dequantize.CONFIG.block_n, "PTX": "ptx" in gpu.features,
    }  # fmt: skip
    return _case(dequantize.dequantize_kernel, signature, constexprs, gpu, dequantize.CONFIG)


def input_cases(gpu: Target, width: int = 4096) -> dict[str, Case]:
    """The kernels that make inputs ready, for rows of at most ``width``."""
    config, block = Config(0, 0, warps=4, stages=3), row_block(width)
    kinds = ("i8", "fp8e4nv") if "fp8" in gpu.features else ("i8",)
    gather = {"x": "*fp16", "order": "*i32", "out": "*fp16", "k": "i32", "stride_x": "i32", "stride_out": "i32"}
    found = {f"gather_columns {gpu.architecture}": _case(gather_columns_kernel, gather, {"WIDTH": 1024}, gpu, config)}
    for kind in kinds:
        limit = 127.0 if kind == "i8" else 448.0
        common = {"x": "*fp16", "codes": "*" + kind, "scales": "*fp32", "k": "i32"}
        strides = {"stride_x": "i32", "stride_codes": "i32"}
        found[f"round_rows {kind} {gpu.architecture}"] = _case(
            round_rows_kernel, {**common, **strides, "input_scale": "fp32"},
            {"STATIC": False, "LIMIT": limit, "WIDTH": width, "BLOCK": block}, gpu,
            replace(config, warps=row_warps(block)),
        )  # fmt: skip
        found[f"round_groups {kind} {gpu.architecture}"] = _case(
            round_groups_kernel, {**common, "groups": "i32", **strides},
            {"LIMIT": limit, "GROUP": 128, "COUNT": 16}, gpu, config,
        )  # fmt: skip
    return found


def cases_of(gpu: Target) -> dict[str, Case]:
    found = {}
    for name, rows in (("few", FEW), ("many", MANY)):
        if name == "few" or "ptx" not in gpu.features or {"wgmma", "tcgen05"} & gpu.features:
            for dtype in ("fp16", "bf16"):
                found[f"w4a16 {name} {dtype} {gpu.architecture}"] = weight_only_case(gpu, rows, dtype=dtype)
            found[f"int8 {name} {gpu.architecture}"] = eight_bit_case(gpu, rows, "i8")
            if "fp8" in gpu.features:
                found[f"fp8 {name} {gpu.architecture}"] = eight_bit_case(gpu, rows, "fp8e4nv")
    if persistent.runs(gpu):
        made = persistent.default(MANY, 256, grouped=False)
        found[f"persistent channel {gpu.architecture}"] = persistent_case(gpu, made, "fp8e4nv")
    found[f"dequantize {gpu.architecture}"] = dequantize_case(gpu)
    for bits in (2, 3, 4):
        found[f"trellis few {bits} bits {gpu.architecture}"] = trellis_case(gpu, FEW, bits)
    found[f"trellis dequantize {gpu.architecture}"] = dequantize_trellis_case(gpu, 3)
    return found | input_cases(gpu)


def amd_cases() -> dict[str, Case]:
    """The same for AMD."""
    found: dict[str, Case] = {}
    for gpu in map(described, AMD):
        found |= cases_of(gpu)
    name = "experts w4a16 down rows 16 gfx950"
    return found | {name: expert_cases(described("gfx950"), 16)[name]}


def cases() -> dict[str, Case]:
    """A decode of each kernel for each architecture, and a prefill where the matrix unit has another instruction."""
    found: dict[str, Case] = {}
    for gpu in ARCHITECTURES:
        found |= cases_of(gpu)
        found[f"w4a16 fp4 {gpu.architecture}"] = weight_only_case(gpu, FEW, group=32, dtype="bf16", fp4=True)
    grouped, small = persistent.default(MANY, 256, grouped=True), persistent.default(512, 256, grouped=False)
    found["persistent blocks sm_90"] = persistent_case(described("sm_90"), grouped, "fp8e4nv", 128, 128)
    found["persistent small sm_90"] = persistent_case(described("sm_90"), small, "fp8e4nv", out="fp32", accumulate=True)
    few = expert_cases(described("sm_90"), 16)
    found |= {name: few[name] for name in ("experts w4a16 up rows 16 sm_90", "experts dense down rows 16 sm_90")}
    found["trellis many 4 bits sm_90"] = trellis_case(described("sm_90"), 64, 4)
    found["w8a16 few sm_80"] = weight_only_case(described("sm_80"), FEW, bits=8, group=64)
    return found


def tuned_cases(folder: Path = DATA) -> dict[str, Case]:
    """Every configuration of the files that are shipped; those in bfloat16 also in float16, for which they are used.

    The dequantizing kernel has but one; cuBLAS is compiled."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        gpu = described(content["architecture"])
        for key, measured in content["entries"].items():
            kernel, measured_in, *words = key.split()
            named = dict(word.split("=") for word in words if "=" in word)
            dtypes = (measured_in, *["float16"] * (measured_in == "bfloat16"))
            for (rows, each), dtype in product(measured.items(), dtypes):
                config = Config(**each["config"])
                name = f"{path.stem} {key} {rows} {dtype} {gpu.architecture}"
                if kernel == "weight_only" and config.kernel == "tiles":
                    bits, group = int(named["bits"]), int(named["group"])
                    for kind in ("float", "both") if words[2] == "float" else (words[2],):
                        found[f"{name} {kind}"] = weight_only_case(
                            gpu, 0, bits, group, kind, TYPES[dtype], accumulate=True, config=config
                        )
                elif kernel == "trellis" and config.kernel == "tiles":
                    found[name] = trellis_case(
                        gpu, 0, int(named["bits"]), int(named["group"]), TYPES[dtype], accumulate=True, config=config
                    )
                elif kernel == "eight_bit" and config.kernel != "scaled_mm":
                    group, x_group = map(int, named["group"].split(","))
                    if config.kernel == "persistent":
                        found[name] = persistent_case(gpu, config, TYPES[dtype], group, x_group)
                    else:
                        found[name] = eight_bit_case(gpu, 0, TYPES[dtype], group, x_group, "bf16", config)
    return found


def every_case() -> dict[str, Case]:
    """Every default configuration, and every way a kernel is specialized, for every architecture; what is shipped."""
    found = tuned_cases() | every_expert_case()
    for gpu in ARCHITECTURES:
        for width in (4096, 8192, 16384, 32768):
            made = input_cases(gpu, width).items()
            found |= {f"{name} {width}": case for name, case in made if width == 4096 or "round_rows" in name}
        for rows, dtype, even_k in product((16, 32, 64, MANY), ("fp16", "bf16"), (True, False)):
            for bits, group, kind in (
                (4, 128, "pairs"), (4, 64, "pairs"), (4, 32, "pairs"), (4, 128, "zeros"), (4, 128, "float"),
                (4, 128, "both"), (4, 0, "float"), (8, 128, "zeros"), (8, 128, "float"), (8, 64, "pairs"),
                (8, 0, "float"),
            ):  # fmt: skip
                name = f"w{bits}a16 g{group} {kind} {dtype}{' even' * even_k} rows {rows} {gpu.architecture}"
                found[name] = weight_only_case(
                    gpu, rows, bits, group, kind, dtype, even_k, accumulate=True
                )
        for bits, group, kind in ((4, 128, "pairs"), (4, 32, "pairs"), (4, 128, "both"), (8, 128, "float")):
            config = weight_only.default(32, bits, group, gpu, invariant=True)
            found[f"w{bits}a16 g{group} {kind} invariant rows 32 {gpu.architecture}"] = weight_only_case(
                gpu, 32, bits, group, kind, "bf16", even_k=False, accumulate=True, config=config
            )
        for rows, bits, group in product((16, 64), (2, 3, 4), (128, 64, 32, 16, 0)):
            if rows == 16 or trellis.default(rows, gpu) != trellis.default(16, gpu):
                for dtype, even_k in (("fp16", True), ("bf16", False)):
                    name = f"trellis {bits} bits g{group} {dtype}{' even' * even_k} rows {rows} {gpu.architecture}"
                    found[name] = trellis_case(gpu, rows, bits, group, dtype, even_k, accumulate=True)
        for dtype, bits, group in product(("fp16", "bf16"), (2, 3, 4), (64, 32, 0)):
            name = f"trellis dequantize {bits} bits g{group} {dtype} {gpu.architecture}"
            found[name] = dequantize_trellis_case(gpu, bits, group, dtype)
        if persistent.runs(gpu):
            found |= persistent_cases(gpu)
        kinds = ((4, 128, "pairs"), (4, 32, "pairs"), (4, 128, "zeros"), (4, 0, "both"), (8, 128, "zeros"),
                 (8, 64, "float"))  # fmt: skip
        for dtype, (bits, group, kind) in product(("fp16", "bf16"), kinds):
            name = f"dequantize w{bits} g{group} {kind} {dtype} {gpu.architecture}"
            found[name] = dequantize_case(gpu, bits, group, kind, dtype)
        for rows in (16, 32, 128, 256, MANY):
            for kind in ("i8", "fp8e4nv") if "fp8" in gpu.features else ("i8",):
                for group, x_group in ((0, 0), (128, 0), (128, 128), (64, 0), (64, 64), (0, 128)):
                    found[f"{kind} g{group},{x_group} rows {rows} {gpu.architecture}"] = eight_bit_case(
                        gpu, rows, kind, group, x_group, "bf16"
                    )
    return found
