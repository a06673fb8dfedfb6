"""``round_columns_kernel`` as it is compiled for each architecture."""

from __future__ import annotations

from qserve.kernels.triton.sweep import COLUMNS, round_columns_kernel
from tests.kernels.triton.aot import Case

_POINTERS = {
    "left": "*fp32", "aims": "*fp32", "error": "*fp32", "codes": "*u8", "upper": "*fp32", "scales": "*fp32",
    "zeros": "*fp32", "groups": "*i32",
}  # fmt: skip
_NUMBERS = dict.fromkeys(("first", "count", "inputs", "outputs"), "i32") | {"zero": "fp32", "max_code": "fp32"}


def cases() -> dict[str, Case]:
    found = {}
    for architecture in ("sm_80", "sm_90", "sm_100"):
        for name, e2m1 in (("integers", False), ("e2m1", True)):
            constants = {"AIMS": True, "ZEROS": not e2m1, "E2M1": e2m1, "COLUMNS": COLUMNS, "OUTPUTS": 32}
            signature = _POINTERS | _NUMBERS | dict.fromkeys(constants, "constexpr")
            found[f"{name} {architecture}"] = Case(
                round_columns_kernel, signature, constants, architecture, num_warps=1, divisible=tuple(_POINTERS)
            )
    return found
