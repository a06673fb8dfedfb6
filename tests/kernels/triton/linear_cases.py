"""What the ahead-of-time tests of the linear products compile: ``cases`` in the default suite, ``every_case`` in CI.

Loaded by ``aot.py`` as a program, and by the tests for the names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from qserve.kernels.triton import dequantize, eight_bit, persistent, weight_only
from qserve.kernels.triton.inputs import (
    gather_columns_kernel,
    round_groups_kernel,
    round_rows_kernel,
    row_block,
    row_warps,
)
from qserve.kernels.triton.prepack import _shape
from qserve.kernels.triton.target import FP8
from qserve.kernels.triton.tuning.configs import Config
from qserve.kernels.triton.tuning.tuned import DATA
from tests.kernels.triton.aot import Case

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))
GPUS = {"A100": (8, 0), "L4": (8, 9), "L40S": (8, 9), "H100": (9, 0), "H200": (9, 0), "B200": (10, 0)}
"""By a word of the name that the driver gives."""
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "fp8": "fp8e4nv", "int8": "i8"}
FEW, MANY = 1, 1024
"""Rows of a decode and of a prefill."""


def _case(
    kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], capability: tuple[int, int], config: Config
) -> Case:
    sizes = ("n", "k", "stride_x", "stride_out", "stride_codes", "padded_n")
    divisible = tuple(name for name, kind in signature.items() if kind.startswith("*") or name in sizes)
    return Case(kernel, signature, constexprs, capability, config.warps, config.stages, divisible)


def weight_only_case(
    capability: tuple[int, int], rows: int, bits: int = 4, group: int = 128, kind: str = "pairs",
    dtype: str = "fp16", even_k: bool = True, accumulate: bool = False, config: Config | None = None,
) -> Case:  # fmt: skip
    """``kind`` of scales, or "both" where scales and zero points are float32. None: the default of ``rows``."""
    config, planes = config or weight_only.default(rows, bits, group, capability), 16 // bits
    size = _shape(group or 4096, 32 if group else 1, 4096, planes)[0]
    assert kind != "pairs" or planes * size // group in (2, 4)
    floats = kind in ("float", "both")
    signature = {
        "x": "*" + dtype, "weight": "*i16", "scales": "*fp32" if floats else "*i32", "zeros": "*fp32",
        "bias": "*" + dtype, "out": "*" + dtype, "partial": "*fp32", "arrived": "*i32",
        "rows": "i32", "n": "i32", "k": "i32", "stride_x": "i32", "stride_out": "i32", "padded_n": "i32",
        "blocks": "i32", "splits": "i32",
    }  # fmt: skip
    constexprs = {
        "ZERO": -1 if kind in ("zeros", "both") else 1 << (bits - 1), "BITS": bits, "SLICE": size, "GROUP": group,
        "SCALES": "float" if floats else kind, "HAS_BIAS": False, "ACCUMULATE": accumulate, "EVEN_K": even_k,
        "SWAP": config.swap, "SPLIT": config.splits != 1, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "STAGES": config.stages, "COMPILED": True,
    }  # fmt: skip
    return _case(weight_only.weight_only_kernel, signature, constexprs, capability, config)


def eight_bit_case(
    capability: tuple[int, int], rows: int, kind: str, group: int = 0, x_group: int = 0, out: str = "fp16",
    config: Config | None = None,
) -> Case:  # fmt: skip
    config = config or eight_bit.default(rows, group + x_group > 0, capability)
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
    return _case(eight_bit.eight_bit_kernel, signature, constexprs, capability, config)


def persistent_case(
    capability: tuple[int, int], config: Config, kind: str, group: int = 0, x_group: int = 0, out: str = "bf16",
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
        "EXACT": persistent.exact(kind == "i8", capability),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PART_N": part, "COLUMN": persistent.COLUMN,
    }  # fmt: skip
    made = _case(persistent.persistent_kernel, signature, constexprs, capability, config)
    return replace(made, maxnreg=persistent.most_registers(config, group + x_group > 0))


def persistent_cases(capability: tuple[int, int]) -> dict[str, Case]:
    """Every configuration of every way it is specialized."""
    found = {}
    for kind in ("fp8e4nv", "i8") if capability == (9, 0) else ("fp8e4nv",):
        for group, x_group in ((0, 0), (128, 128), (128, 0), (0, 128)) if kind == "fp8e4nv" else ((0, 0),):
            for config in persistent.configs(256, group + x_group > 0):
                for out, accumulate in (("bf16", False), ("fp32", True)):
                    tile = f"{config.block_m}x{config.block_n} {config.stages} stages"
                    name = f"persistent {kind} g{group},{x_group} {tile} {out} sm_{capability[0]}{capability[1]}"
                    found[name] = persistent_case(capability, config, kind, group, x_group, out, accumulate)
    return found


def dequantize_case(
    capability: tuple[int, int], bits: int = 4, group: int = 128, kind: str = "pairs", dtype: str = "bf16"
) -> Case:
    floats = kind in ("float", "both")
    signature = {
        "weight": "*i16", "scales": "*fp32" if floats else "*i32", "zeros": "*fp32", "out": "*" + dtype,
        "padded_n": "i32", "first": "i32", "last": "i32", "stride_out": "i32",
    }  # fmt: skip
    constexprs = {
        "ZERO": -1 if kind in ("zeros", "both") else 1 << (bits - 1), "BITS": bits, "GROUP": group,
        "SLICE": _shape(group or 4096, 32 if group else 1, 4096, 16 // bits)[0],
        "SCALES": "float" if floats else kind, "BLOCK_N": dequantize.CONFIG.block_n, "COMPILED": True,
    }  # fmt: skip
    return _case(dequantize.dequantize_kernel, signature, constexprs, capability, dequantize.CONFIG)


def input_cases(capability: tuple[int, int], width: int = 4096) -> dict[str, Case]:
    """The kernels that make inputs ready, for rows of at most ``width``."""
    arch = capability[0] * 10 + capability[1]
    config, block = Config(0, 0, warps=4, stages=3), row_block(width)
    kinds = ("i8", "fp8e4nv") if capability >= FP8 else ("i8",)
    gather = {"x": "*fp16", "order": "*i32", "out": "*fp16", "k": "i32", "stride_x": "i32", "stride_out": "i32"}
    found = {f"gather_columns sm_{arch}": _case(gather_columns_kernel, gather, {"WIDTH": 1024}, capability, config)}
    for kind in kinds:
        limit = 127.0 if kind == "i8" else 448.0
        common = {"x": "*fp16", "codes": "*" + kind, "scales": "*fp32", "k": "i32"}
        strides = {"stride_x": "i32", "stride_codes": "i32"}
        found[f"round_rows {kind} sm_{arch}"] = _case(
            round_rows_kernel, {**common, **strides, "input_scale": "fp32"},
            {"STATIC": False, "LIMIT": limit, "WIDTH": width, "BLOCK": block}, capability,
            replace(config, warps=row_warps(block)),
        )  # fmt: skip
        found[f"round_groups {kind} sm_{arch}"] = _case(
            round_groups_kernel, {**common, "groups": "i32", **strides},
            {"LIMIT": limit, "GROUP": 128, "COUNT": 16}, capability, config,
        )  # fmt: skip
    return found


def cases() -> dict[str, Case]:
    """A decode of each kernel for each architecture, and a prefill where the matrix unit has another instruction."""
    found = {}
    for capability in CAPABILITIES:
        arch = capability[0] * 10 + capability[1]
        for name, rows in (("few", FEW), ("many", MANY))[: 2 if capability >= (9, 0) else 1]:
            for dtype in ("fp16", "bf16"):
                found[f"w4a16 {name} {dtype} sm_{arch}"] = weight_only_case(capability, rows, dtype=dtype)
            found[f"int8 {name} sm_{arch}"] = eight_bit_case(capability, rows, "i8")
            if capability >= FP8:
                found[f"fp8 {name} sm_{arch}"] = eight_bit_case(capability, rows, "fp8e4nv")
        if capability in persistent.CAPABILITIES:
            made = persistent.default(MANY, 256, grouped=False)
            found[f"persistent channel sm_{arch}"] = persistent_case(capability, made, "fp8e4nv")
        found[f"dequantize sm_{arch}"] = dequantize_case(capability)
        found |= input_cases(capability)
    grouped, small = persistent.default(MANY, 256, grouped=True), persistent.default(512, 256, grouped=False)
    found["persistent blocks sm_90"] = persistent_case((9, 0), grouped, "fp8e4nv", 128, 128)
    found["persistent small sm_90"] = persistent_case((9, 0), small, "fp8e4nv", out="fp32", accumulate=True)
    found["w8a16 few sm_80"] = weight_only_case((8, 0), FEW, bits=8, group=64)
    return found


def tuned_cases(folder: Path = DATA) -> dict[str, Case]:
    """Every configuration of the files that are shipped. The dequantizing kernel has but one."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        capability = next(each for name, each in GPUS.items() if name in content["gpu"].split())
        arch = capability[0] * 10 + capability[1]
        for key, measured in content["entries"].items():
            kernel, dtype, *words = key.split()
            named = dict(word.split("=") for word in words if "=" in word)
            for rows, each in measured.items():
                config = Config(**each["config"])
                name = f"{path.stem} {key} {rows} sm_{arch}"
                if kernel == "weight_only" and config.kernel == "tiles":
                    bits, group = int(named["bits"]), int(named["group"])
                    for kind in ("float", "both") if words[2] == "float" else (words[2],):
                        found[f"{name} {kind}"] = weight_only_case(
                            capability, 0, bits, group, kind, TYPES[dtype], accumulate=True, config=config
                        )
                elif kernel == "eight_bit":
                    group, x_group = map(int, named["group"].split(","))
                    if config.kernel == "persistent":
                        found[name] = persistent_case(capability, config, TYPES[dtype], group, x_group)
                    else:
                        found[name] = eight_bit_case(capability, 0, TYPES[dtype], group, x_group, "bf16", config)
    return found


def every_case() -> dict[str, Case]:
    """Every default configuration, and every way a kernel is specialized, for every architecture; what is shipped."""
    found = tuned_cases()
    for capability in CAPABILITIES:
        arch = capability[0] * 10 + capability[1]
        for width in (4096, 8192, 16384, 32768):
            made = input_cases(capability, width).items()
            found |= {f"{name} {width}": case for name, case in made if width == 4096 or "round_rows" in name}
        for rows, dtype, even_k in product((16, 32, 64, MANY), ("fp16", "bf16"), (True, False)):
            for bits, group, kind in (
                (4, 128, "pairs"), (4, 64, "pairs"), (4, 32, "pairs"), (4, 128, "zeros"), (4, 128, "float"),
                (4, 128, "both"), (4, 0, "float"), (8, 128, "zeros"), (8, 128, "float"), (8, 64, "pairs"),
                (8, 0, "float"),
            ):  # fmt: skip
                name = f"w{bits}a16 g{group} {kind} {dtype}{' even' * even_k} rows {rows} sm_{arch}"
                found[name] = weight_only_case(
                    capability, rows, bits, group, kind, dtype, even_k, accumulate=True
                )
        for bits, group, kind in ((4, 128, "pairs"), (4, 32, "pairs"), (4, 128, "both"), (8, 128, "float")):
            config = weight_only.default(32, bits, group, capability, invariant=True)
            found[f"w{bits}a16 g{group} {kind} invariant rows 32 sm_{arch}"] = weight_only_case(
                capability, 32, bits, group, kind, "bf16", even_k=False, accumulate=True, config=config
            )
        if capability in persistent.CAPABILITIES:
            found |= persistent_cases(capability)
        kinds = ((4, 128, "pairs"), (4, 32, "pairs"), (4, 128, "zeros"), (4, 0, "both"), (8, 128, "zeros"),
                 (8, 64, "float"))  # fmt: skip
        for dtype, (bits, group, kind) in product(("fp16", "bf16"), kinds):
            name = f"dequantize w{bits} g{group} {kind} {dtype} sm_{arch}"
            found[name] = dequantize_case(capability, bits, group, kind, dtype)
        for rows in (16, 32, 128, 256, MANY):
            for kind in ("i8", "fp8e4nv") if capability >= FP8 else ("i8",):
                for group, x_group in ((0, 0), (128, 0), (128, 128), (64, 0), (64, 64), (0, 128)):
                    found[f"{kind} g{group},{x_group} rows {rows} sm_{arch}"] = eight_bit_case(
                        capability, rows, kind, group, x_group, "bf16"
                    )
    return found
