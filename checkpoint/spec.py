"""``QuantSpec``: what a checkpoint's numbers mean, independent of any on-disk format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.grid import INTEGERS, Grid, grid_named, input_grid

SUPERBLOCK = 256
"""Inputs that share the float16 of two-level scales."""


@dataclass(frozen=True)
class WeightScheme:
    """How the weight of one linear is stored.

    A scale is shared by ``group_size`` inputs (-1: all of them) of ``rows`` outputs (-1: all of them): (64, 1) is
    the usual group, (-1, 1) per channel, (-1, -1) per tensor, (128, 128) a block.
    ``dtype`` names the ``grid`` of its codes: ``int``, unsigned codes around a zero point, which is
    ``2 ** (bits - 1)`` where it is symmetric; ``fp8``, e4m3 numbers; ``fp4``, e2m1 numbers; ``hqq``, unsigned codes
    around a zero point that is a real number; ``trellis``, codes that 64 outputs choose together.
    ``scale_bits`` are those of two-level scales: each is an integer of so many bits, times a float16 that
    ``SUPERBLOCK`` inputs share. What a real zero point takes away, the minimum, is stored likewise. 0: each scale is
    a number of its own. Raises ``UsageError`` for what is not known.
    """

    bits: int
    group_size: int = 64
    symmetric: bool = True
    dtype: str = "int"
    rows: int = 1
    scale_bits: int = 0

    def __post_init__(self) -> None:
        grid = self.grid
        if self.bits not in INTEGERS.bits:
            raise UsageError(f"bits must be one of {', '.join(map(str, INTEGERS.bits))}, not {self.bits}")
        if self.bits not in grid.bits or not (self.symmetric or grid.zero_points):
            zeros = "" if grid.zero_points else " and no zero points"
            raise UsageError(f"{grid.name} weights have {' or '.join(map(str, grid.bits))} bits{zeros}")
        if self.symmetric and grid.real_zeros:
            raise UsageError(f"{grid.name} weights have a zero point for each group: they are not symmetric")
        if self.group_size != -1 and (self.group_size < 8 or self.group_size % 8):
            raise UsageError(f"group size must be -1 or a multiple of 8, not {self.group_size}")
        if self.rows != -1 and self.rows < 1:
            raise UsageError(f"rows that share a scale must be -1 or at least 1, not {self.rows}")
        if self.scale_bits and (SUPERBLOCK % self.group_size or self.rows != 1 or self.group_size < 1):
            raise UsageError(f"two-level scales need groups that divide {SUPERBLOCK} inputs, of one output each")

    @property
    def grid(self) -> Grid:
        return grid_named(self.dtype)

    def groups(self, in_features: int) -> int:
        """Number of groups along an input of ``in_features`` (the last may be short)."""
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    def group_width(self, in_features: int) -> int:
        """Input features per group: ``group_size``, or ``in_features`` for per-channel scales."""
        return in_features if self.group_size == -1 else self.group_size

    def can_cut(self, in_features: int, at: int) -> bool:
        """Whether an input of ``in_features`` can be divided before the input ``at``: no group lies on both sides, or
        the only one may."""
        return at in (0, in_features) or self.groups(in_features) == 1 or at % self.group_size == 0

    def row_height(self, out_features: int) -> int:
        """Outputs that share a scale."""
        return out_features if self.rows == -1 else self.rows

    @property
    def joins_outputs(self) -> bool:
        """Whether several outputs share a scale, or bits of their codes."""
        return self.rows != 1 or self.grid.ring != 1

    @property
    def zero(self) -> int:
        """The zero point of a symmetric scheme."""
        return 1 << (self.bits - 1) if self.grid.zero is None else self.grid.zero

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1 if self.grid.most is None else self.grid.most

    def storage_bits(self, out_features: int, in_features: int, *, symmetric_zeros: bool = True) -> int:
        """Bits of a weight [out, in] in a packed format: codes, scales and packed zero points. Zero points that
        are all the same count only where the format has ``symmetric_zeros``."""
        blocks = self.groups(in_features) * -(-out_features // self.row_height(out_features))
        scale_bits = blocks * (self.scale_bits or self.grid.scale_bits)
        if self.scale_bits:
            scale_bits += out_features * -(-in_features // SUPERBLOCK) * 16
        zero_bits = 0
        if self.grid.zero_points and (symmetric_zeros or not self.symmetric):
            zero_bits = scale_bits if self.grid.real_zeros else blocks * self.bits
        coded = -(-out_features // self.grid.ring) * self.grid.ring
        return coded * in_features * self.bits + scale_bits + zero_bits

    def __str__(self) -> str:
        """For people: ``4 bit g64 symmetric``, ``fp8 per channel``, ``6 bit g16 symmetric (8-bit scales)``."""
        shared = {(-1, 1): "per channel", (-1, -1): "per tensor"}.get((self.group_size, self.rows))
        shared = shared or (f"g{self.group_size}" if self.rows == 1 else f"{self.rows}x{self.group_size} blocks")
        if self.scale_bits:
            kind = "symmetric" if self.symmetric else "asymmetric"
            return f"{self.bits} bit {shared} {kind} ({self.scale_bits}-bit scales)"
        if self.grid is not INTEGERS:
            bits = f"{self.bits} bit " if len(self.grid.bits) > 1 else ""
            return f"{bits}{shared} {self.dtype}" if self.grid.real_zeros or bits else f"{self.dtype} {shared}"
        return f"{self.bits} bit {shared} {'symmetric' if self.symmetric else 'asymmetric'}"


MXFP4, NVFP4 = WeightScheme(4, 32, dtype="fp4"), WeightScheme(4, 16, dtype="fp4")
"""Their scales are powers of two; and e4m3 numbers over a number that the whole weight has."""
MXFP8 = WeightScheme(8, 32, dtype="fp8")
"""As it is written, its scales are powers of two."""
MICROSCALED = (MXFP4, NVFP4, MXFP8)
"""No other group has such scales."""


@dataclass(frozen=True)
class ActivationScheme:
    """How the input of a linear is rounded before the product.

    ``granularity``: one scale per token, per ``group_size`` inputs of a token, or for the whole tensor. A dynamic
    scale is the absolute maximum of what it covers; a static one (per tensor only) was fixed by calibration. The scale
    of a group of fp4, of 16 inputs, is an e4m3 number times a static one (NVFP4).
    """

    dtype: Literal["int8", "fp8", "fp4"]
    granularity: Literal["token", "group", "tensor"] = "token"
    dynamic: bool = True
    group_size: int = -1

    def __post_init__(self) -> None:
        input_grid(self.dtype)
        if self.dtype == "fp4" and (self.granularity, self.group_size, self.dynamic) != ("group", 16, False):
            raise UsageError("fp4 inputs have a scale for each group of 16, times a static one")
        if not self.dynamic and self.granularity != "tensor" and self.dtype != "fp4":
            raise UsageError("static activation scales are per tensor")
        if (self.granularity == "group") != (self.group_size != -1):
            raise UsageError("activation groups need a group size, and only they")

    @property
    def grid(self) -> Grid:
        return input_grid(self.dtype)

    def __str__(self) -> str:
        shared = f"group of {self.group_size}" if self.granularity == "group" else self.granularity
        return f"{self.dtype} per {shared}, {'dynamic' if self.dynamic else 'static'}"


NVFP4_INPUTS = ActivationScheme("fp4", "group", dynamic=False, group_size=16)


@dataclass(frozen=True)
class KVScheme:
    """How cached keys and values are stored: with static symmetric scales, one per tensor or one per KV head, or with a
    scale for each token and head, chosen as it is cached (``INT4_KV``)."""

    dtype: Literal["int8", "fp8", "int4_per_token_head"]
    granularity: Literal["tensor", "head", "token"] = "tensor"

    @property
    def grid(self) -> Grid:
        """Of static scales."""
        return input_grid(self.dtype)

    @property
    def dynamic(self) -> bool:
        return self.granularity == "token"

    def __str__(self) -> str:
        return self.dtype if self.dynamic else f"{self.dtype} per {self.granularity}"


INT4_KV = KVScheme("int4_per_token_head", "token")


@dataclass(frozen=True)
class QuantSpec:
    """The quantization of a whole checkpoint.

    ``method`` tells people how the codes were chosen; readers do not need it ("unknown" where no file says).
    ``overrides`` maps a full module name (``model.layers.0.mlp.down_proj``) to its own scheme; ``ignored`` names
    linears that stay in floating point; ``float_inputs`` names packed linears whose input is not rounded although
    ``activations`` says so for the others (an output layer, an embedding).
    """

    method: str
    weights: WeightScheme
    activations: ActivationScheme | None = None
    kv_cache: KVScheme | None = None
    act_order: bool = False
    overrides: Mapping[str, WeightScheme] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("lm_head",)
    float_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))

    def scheme_of(self, module: str) -> WeightScheme | None:
        """The scheme of ``module``, or None where it stays in floating point."""
        if module in self.ignored:
            return None
        return self.overrides.get(module, self.weights)

    def activations_of(self, module: str) -> ActivationScheme | None:
        """How the input of a packed ``module`` is rounded, or None where it is not."""
        return None if module in self.float_inputs else self.activations
