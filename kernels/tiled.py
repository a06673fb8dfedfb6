"""Products and embeddings as the C kernels read them: weights in tiles or bytes, and numbers that describe them.

The fields are those of ``qs_linear`` and ``qs_embed`` in ``csrc/qserve.h``, which says what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qserve.checkpoint.grid import E4M3, INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels import abi
from qserve.kernels.fusion import FusedLinear
from qserve.kernels.ops import Embed
from qserve.kernels.prepack import float8_tiles, float_tiles, int_tiles, is_expanded

Keep = Callable[[Tensor], Tensor]
"""Moves tiles to the place where they stay."""


@dataclass(frozen=True)
class TiledLinear:
    x: Tensor
    out: Tensor
    weight: Tensor
    k: int
    n: int
    x_width: int
    out_stride: int
    dtype: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bias: Tensor | None = None
    norm: Tensor | None = None
    permutation: Tensor | None = None
    scale_dtype: int = 0
    group: int = 0
    act_dtype: int = 0
    act_span: int = 0
    act_group: int = 0
    zero: int = 0
    accumulate: bool = False
    silu: bool = False
    input_scale: float = 0.0
    eps: float = 0.0


@dataclass(frozen=True)
class TiledEmbed:
    table: Tensor
    out: Tensor
    width: int
    dtype: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0
    zero: int = 0
    scale: float = 1.0


def tile_linear(fused: FusedLinear, keep: Keep) -> TiledLinear:
    """Raises ``ValueError`` where the weight does not map ``x`` to ``out``: the C side does not check its numbers."""
    op, norm = fused.linear, fused.norm
    x, out = norm.x if norm else op.x, fused.silu.out if fused.silu else op.out
    packed = isinstance(op.weight, QuantizedWeight)
    shape = (op.weight.out_features, op.weight.in_features) if packed else tuple(op.weight.shape)  # type: ignore[union-attr]
    if shape != (op.out.shape[1], op.x.shape[1]):
        raise ValueError(f"a weight of {shape} does not map {op.x.shape[1]} inputs to {op.out.shape[1]} outputs")
    weight = _tiles(op.weight, keep)
    return TiledLinear(
        x=x,
        out=out,
        n=op.out.shape[1],
        x_width=x.shape[1],
        out_stride=out.stride(0),
        bias=None if op.bias is None else op.bias.float().contiguous(),
        norm=None if norm is None else norm.weight.float().contiguous(),
        eps=norm.eps if norm else 0.0,
        accumulate=op.accumulate,
        silu=fused.silu is not None,
        **weight,
    )


def _tiles(weight: Tensor | QuantizedWeight, keep: Keep) -> dict[str, Any]:
    """The fields of ``TiledLinear`` that follow from the weight."""
    if isinstance(weight, Tensor):
        return {"weight": keep(float_tiles(weight)), "k": weight.shape[1], "dtype": abi.FLOATS[weight.dtype]}
    scheme, activations = weight.scheme, weight.activations
    inputs = {"input_scale": weight.input_scale or 0.0}
    if scheme.grid is INTEGERS and not is_expanded(scheme, activations):
        tiles = int_tiles(weight)
        return {
            # In this order: at the end of the preceding weights, the prefetch runs into these scales.
            "scales": keep(tiles.scales),
            "zeros": None if tiles.zeros is None else keep(tiles.zeros),
            "weight": keep(tiles.weight),
            "permutation": None if tiles.permutation is None else keep(tiles.permutation),
            "scale_dtype": abi.FLOATS[tiles.scales.dtype],
            "k": tiles.k,
            "dtype": abi.U4 if tiles.bits == 4 else abi.U8,
            "group": tiles.group,
            "act_dtype": abi.I8,
            "act_span": tiles.act_span,
            "act_group": tiles.act_group,
            "zero": tiles.zero,
            **inputs,
        }
    inp = weight.in_features
    if activations is not None:
        inputs["act_dtype"] = abi.F8 if activations.grid is E4M3 else abi.I8
        inputs["act_span"] = activations.group_size if activations.granularity == "group" else inp
    if scheme.grid is INTEGERS:
        return {"weight": keep(float_tiles(weight.dequantize())), "k": inp, "dtype": 0, **inputs}
    codes, scales = (keep(each) for each in float8_tiles(weight))
    group = scheme.group_width(inp)
    return {"weight": codes, "scales": scales, "k": inp, "dtype": abi.F8, "group": group, **inputs}


def tile_embed(op: Embed) -> TiledEmbed:
    table, width = op.table, op.out.shape[1]
    if isinstance(table, Tensor):
        return TiledEmbed(table, op.out, width, abi.FLOATS[table.dtype], scale=op.scale)
    return TiledEmbed(
        table.codes,
        op.out,
        width,
        abi.F8 if table.scheme.grid is E4M3 else abi.U8,
        scales=table.scales,
        zeros=table.zeros,
        group=table.scheme.group_width(width),
        zero=table.scheme.zero,
        scale=op.scale,
    )
