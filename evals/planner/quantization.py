"""``Quantization``: a way to store weights, a way to store keys and values, and the dtype of the computation.

The loss of quality is not planned: ``qserve eval`` measures it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.spec import WeightScheme

Compute = Literal["bf16", "fp8", "int8"]
KV_DTYPES = ("fp16", "fp8", "int8", "int4_per_token_head")


def kv_bytes(dtype: str, head_dim: int) -> float:
    """Bytes of a number in a KV cache of ``dtype``. Each token's head has a step and a low of 16 bits in 4 bits."""
    if dtype == "int4_per_token_head":
        return 0.5 + 4 / head_dim
    return 2.0 if dtype == "fp16" else 1.0


@dataclass(frozen=True)
class Quantization:
    """``scheme`` None is 16 bits; ``compute`` is the dtype of the products, ``made_by`` the options of ``quantize``."""

    name: str
    scheme: WeightScheme | None
    compute: Compute
    made_by: str


_PLAIN = {
    "bf16": Quantization("bf16", None, "bf16", ""),
    "fp8": Quantization("fp8", WeightScheme(8, -1, dtype="fp8"), "fp8", "--scheme fp8"),
    "w8a8": Quantization("w8a8", WeightScheme(8, -1), "int8", "--scheme w8a8"),
}
DEFAULT = ("bf16", "fp8", "w8a8", "w4g128")
"""The quantizations that are tried, the least compressed first."""


def quantization(name: str) -> Quantization:
    """``bf16``, ``fp8``, ``w8a8``, or integer weights under 16-bit inputs as ``w4g128``. Raises ``UsageError``."""
    if name in _PLAIN:
        return _PLAIN[name]
    found = re.fullmatch(r"w([0-9])g([0-9]{1,5})", name)
    if found is None:
        raise UsageError(f"a quantization is bf16, fp8, w8a8, or wBITSgGROUP as w4g128, not {name!r}")
    bits, group = int(found[1]), int(found[2])
    return Quantization(name, WeightScheme(bits, group), "bf16", f"--bits {bits} --group-size {group}")
