"""``QuantSpec``: what a checkpoint's numbers mean, independent of any on-disk format.

Knows schemes and module names; does not know tensors or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from qserve.checkpoint.errors import UsageError

WeightDtype = Literal["int", "fp8"]
Method = Literal["rtn", "gptq", "awq", "unknown"]


@dataclass(frozen=True)
class WeightScheme:
    """How the weight of one linear is stored.

    ``group_size`` counts input features that share one scale; -1 means the whole input (per channel).
    A symmetric scheme has the fixed zero point ``2 ** (bits - 1)``.
    """

    bits: int
    group_size: int = 64
    symmetric: bool = True
    dtype: WeightDtype = "int"

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UsageError(f"bits must be 2, 3, 4 or 8, not {self.bits}")
        if self.group_size != -1 and (self.group_size < 8 or self.group_size % 8):
            raise UsageError(f"group size must be -1 or a multiple of 8, not {self.group_size}")

    def groups(self, in_features: int) -> int:
        """Number of groups along an input of ``in_features`` (the last may be short)."""
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    def group_width(self, in_features: int) -> int:
        """Input features per group: ``group_size``, or ``in_features`` for per-channel scales."""
        return in_features if self.group_size == -1 else self.group_size

    @property
    def zero(self) -> int:
        """The zero point of a symmetric scheme."""
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class ActivationScheme:
    """How the input of a linear is quantized when the checkpoint asks for it."""

    dtype: Literal["int8", "fp8"]
    granularity: Literal["token", "tensor"] = "token"
    dynamic: bool = True


@dataclass(frozen=True)
class QuantSpec:
    """The quantization of a whole checkpoint.

    ``overrides`` maps a full module name (``model.layers.0.mlp.down_proj``) to its own scheme;
    ``ignored`` names linears that stay in floating point.
    """

    method: Method
    weights: WeightScheme
    activations: ActivationScheme | None = None
    kv_cache: Literal["fp8", "int8"] | None = None
    act_order: bool = False
    overrides: Mapping[str, WeightScheme] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("lm_head",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))

    def scheme_of(self, module: str) -> WeightScheme | None:
        """The scheme of ``module``, or None where it stays in floating point."""
        if module in self.ignored:
            return None
        return self.overrides.get(module, self.weights)
