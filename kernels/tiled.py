"""Products and embeddings as the C kernels read them: weights in tiles or bytes, and numbers that describe them.

The fields are those of ``qs_linear`` and ``qs_embed`` in ``csrc/qserve.h``, which says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.grid import E2M1, E4M3
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.kernels import abi
from qserve.kernels.code_tiles import Tile
from qserve.kernels.fusion import FusedLinear, alternate, alternating
from qserve.kernels.ops import Embed, Experts, HeadLinear, LayerNorm, Lora
from qserve.kernels.prepack import Take, anywhere, float8_tiles, float_tiles, int_tiles, is_expanded, kept
from qserve.kernels.ranks import Ranks

_OF_ONE = {"input_scale", "permutation"}  # not the same for all experts
_OF_ALL = {"codebook", "before"}


@dataclass(frozen=True)
class TiledLinear:
    x: Tensor
    out: Tensor
    weight: Tensor
    k: int
    n: int
    x_width: int
    x_stride: int
    out_stride: int
    dtype: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    row_scales: Tensor | None = None
    bias: Tensor | None = None
    norm: Tensor | None = None
    norm_bias: Tensor | None = None
    permutation: Tensor | None = None
    before: Tensor | None = None
    codebook: Tensor | None = None
    scale_dtype: int = 0
    group: int = 0
    act_dtype: int = 0
    act_span: int = 0
    act_group: int = 0
    zero: int = 0
    codebook_bytes: int = 0
    bits: int = 0
    tiles: int = 0
    accumulate: bool = False
    centred: bool = False
    function: int = 0
    gated: bool = False
    input_scale: float = 0.0
    eps: float = 0.0
    cap: float = 0.0


@dataclass(frozen=True)
class TiledExperts:
    """``gate_up`` and ``down`` describe the first expert that this rank has; their tensors hold all that it has."""

    gate_up: TiledLinear
    down: TiledLinear
    ranks: Ranks
    experts: Tensor
    weights: Tensor
    out: Tensor
    gate_up_scales: Tensor | None
    down_scales: Tensor | None
    count: int
    top_k: int
    accumulate: bool
    held: int
    first: int


@dataclass(frozen=True)
class TiledHeadLinear:
    """``product``: that of the first head; its weight holds the tiles of all."""

    product: TiledLinear
    heads: int
    x_head: int
    out_head: int


@dataclass(frozen=True)
class TiledEmbed:
    table: Tensor
    out: Tensor
    width: int
    dtype: int
    tokens: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0
    zero: int = 0
    scale: float = 1.0
    first: int = 0


@dataclass(frozen=True)
class TiledLora:
    """``adapters``: the table of ``LoraSlots``, whose bytes change as adapters come and go."""

    x: Tensor
    out: Tensor
    adapters: Tensor
    columns: Tensor
    width: int
    out_stride: int
    parts: int
    max_rank: int


def as_floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def tile_linear(fused: FusedLinear, take: Take, tile: Tile) -> TiledLinear:
    """Raises ``ValueError`` where the weight does not map ``x`` to ``out``: the C side does not check its numbers."""
    op, norm, activation, soft_cap = fused.linear, fused.norm, fused.activation, fused.soft_cap
    x, out = norm.x if norm else op.x, activation.out if activation else op.out
    packed = isinstance(op.weight, QuantizedWeight)
    shape = (op.weight.out_features, op.weight.in_features) if packed else tuple(op.weight.shape)  # type: ignore[union-attr]
    if shape != (op.out.shape[1], op.x.shape[1]):
        raise ValueError(f"a weight of {shape} does not map {op.x.shape[1]} inputs to {op.out.shape[1]} outputs")
    if not x.is_contiguous():
        raise ValueError("the C kernels need contiguous inputs of products")
    weight = _tiles(op.weight, take, tile)
    return TiledLinear(
        x=x,
        out=out,
        n=op.out.shape[1],
        x_width=x.shape[1],
        out_stride=out.stride(0),
        bias=as_floats(op.bias),
        norm=as_floats(norm.weight if norm else None),
        norm_bias=as_floats(norm.bias) if isinstance(norm, LayerNorm) else None,
        eps=norm.eps if norm else 0.0,
        accumulate=op.accumulate,
        centred=isinstance(norm, LayerNorm),
        function=abi.FUNCTIONS[activation.function] if activation else 0,
        gated=activation is not None and activation.gated,
        cap=soft_cap.cap if soft_cap else 0.0,
        **weight,
    )


def _tiles(weight: Tensor | QuantizedWeight, take: Take, tile: Tile) -> dict[str, Any]:
    """The fields of ``TiledLinear`` that follow from the weight."""
    if isinstance(weight, Tensor):
        k = weight.shape[1]
        return {"weight": kept(take, float_tiles(weight)), "k": k, "x_stride": k, "dtype": abi.FLOATS[weight.dtype]}
    scheme, activations = weight.scheme, weight.activations
    inputs = {"input_scale": weight.input_scale or 0.0}
    if scheme.grid.exact and not is_expanded(scheme, activations):
        tiles = int_tiles(weight, take, tile)
        return {
            "scales": tiles.scales,
            "zeros": tiles.zeros,
            "row_scales": tiles.row_scales,
            "weight": tiles.weight,
            "permutation": tiles.permutation,
            "before": tiles.before,
            "bits": tiles.code_bits,
            "tiles": len(tiles.weight),
            "codebook": tiles.codebook,
            "codebook_bytes": 0 if tiles.codebook is None else len(tiles.codebook),
            "scale_dtype": abi.DTYPES[tiles.scales.dtype],
            "k": tiles.k,
            "x_stride": tiles.k,
            "dtype": abi.TRELLIS if tiles.before is not None else abi.U4 if tiles.bits == 4 else abi.U8,
            "group": tiles.group,
            "act_dtype": abi.F4 if activations is not None and activations.grid is E2M1 else abi.I8,
            "act_span": tiles.act_span,
            "act_group": tiles.act_group,
            "zero": tiles.zero,
            **inputs,
        }
    inp = weight.in_features
    inputs["x_stride"] = inp
    if activations is not None:
        inputs["act_dtype"] = abi.F8 if activations.grid is E4M3 else abi.I8
        inputs["act_span"] = activations.group_size if activations.granularity == "group" else inp
    if scheme.grid.exact:
        return {"weight": kept(take, float_tiles(weight.dequantize())), "k": inp, "dtype": 0, **inputs}
    codes, scales = (kept(take, each) for each in float8_tiles(weight))
    group = scheme.group_width(inp)
    return {"weight": codes, "scales": scales, "k": inp, "dtype": abi.F8, "group": group, **inputs}


def tile_head_linear(op: HeadLinear, take: Take) -> TiledHeadLinear:
    """Raises ``ValueError`` where the weight does not map ``x`` to ``out``."""
    shape = (op.heads, op.out.shape[2], op.x.shape[2])
    if tuple(op.weight.shape) != shape or op.out.shape[1] != op.heads:
        raise ValueError(f"a weight of {tuple(op.weight.shape)} is not one of {shape}")
    first = TiledLinear(
        x=op.x[:, 0],
        out=op.out[:, 0],
        weight=kept(take, torch.stack([float_tiles(weight) for weight in op.weight])),
        k=shape[2],
        n=shape[1],
        x_width=shape[2],
        x_stride=op.x.stride(0),
        out_stride=op.out.stride(0),
        dtype=abi.FLOATS[op.weight.dtype],
    )
    return TiledHeadLinear(first, op.heads, op.x.stride(1), op.out.stride(1))


def tile_experts(op: Experts, take: Take, tile: Tile) -> TiledExperts:
    """Raises ``ValueError`` where the weights do not map ``x`` to ``out``, or are not all of one kind."""
    inner = op.activated.shape[1]
    _require_shape(op.gate_up, 2 * inner, op.x.shape[1])
    _require_shape(op.down, op.out.shape[1], inner)
    gate_up, gate_up_scales = _stacked(map(alternating, op.gate_up), take, tile)
    down, down_scales = _stacked(op.down, take, tile)
    return TiledExperts(
        gate_up=TiledLinear(
            x=op.x,
            out=op.activated,
            n=2 * inner,
            x_width=op.x.shape[1],
            out_stride=inner,
            bias=None if op.gate_up_bias is None else alternate(op.gate_up_bias.float().T).T.contiguous(),
            function=abi.FUNCTIONS[op.function],
            gated=True,
            **gate_up,
        ),
        down=TiledLinear(
            x=op.activated,
            out=op.parts,
            n=op.out.shape[1],
            x_width=inner,
            out_stride=op.out.shape[1],
            bias=as_floats(op.down_bias),
            **down,
        ),
        experts=op.experts,
        weights=op.weights,
        out=op.out,
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
        count=op.total or len(op.gate_up),
        top_k=op.experts.shape[1],
        accumulate=op.accumulate,
        ranks=op.ranks,
        held=len(op.gate_up),
        first=op.first,
    )


def _require_shape(weights: Sequence[Tensor | QuantizedWeight], out: int, inp: int) -> None:
    for weight in weights:
        packed = isinstance(weight, QuantizedWeight)
        shape = (weight.out_features, weight.in_features) if packed else tuple(weight.shape)  # type: ignore[union-attr]
        if shape != (out, inp):
            raise ValueError(f"a weight of {shape} does not map {inp} inputs to {out} outputs")


def _stacked(
    weights: Iterable[Tensor | QuantizedWeight], take: Take, tile: Tile
) -> tuple[dict[str, Any], Tensor | None]:
    """The fields of the first of ``weights``, whose tensors hold all of them, one behind the other; and their input
    scales [weights], where they have static ones."""
    tiled = [_tiles(weight, anywhere, tile) for weight in weights]
    first = dict(tiled[0])
    if len({each.get("scale_dtype") for each in tiled}) > 1:  # fewer bits hold the scales of some only
        tiled = [{**each, **_singles(each)} for each in tiled]
        first |= _singles(first)
    if any(each.get("permutation") is not None for each in tiled):
        in_order = torch.arange(first["k"], dtype=torch.int32)
        tiled = [{**each, "permutation": in_order if each["permutation"] is None else each["permutation"]}
                 for each in tiled]  # fmt: skip
    tensors = {name for name, value in tiled[0].items() if isinstance(value, Tensor)} - _OF_ALL
    for each in tiled[1:]:
        if any(each[name] != value for name, value in first.items() if name not in tensors | _OF_ONE | _OF_ALL):
            raise ValueError("the weights of the experts differ in their schemes")
    first |= {name: kept(take, torch.stack([each[name] for each in tiled])) for name in tiled[0] if name in tensors}
    scales = torch.tensor([each.get("input_scale", 0.0) for each in tiled])
    return first, scales if scales.any() else None


def _singles(fields: dict[str, Any]) -> dict[str, Any]:
    """Those of ``fields`` that differ where scales are float32."""
    scales = fields["scales"].float() / (256 if fields["scale_dtype"] == abi.F8 else 1)
    return {"scales": scales, "zeros": as_floats(fields["zeros"]), "scale_dtype": 0}


def tile_embed(op: Embed) -> TiledEmbed:
    table, width = op.table, op.out.shape[1]
    if isinstance(table, Tensor):
        return TiledEmbed(table, op.out, width, abi.FLOATS[table.dtype], len(table), scale=op.scale, first=op.first)
    return TiledEmbed(
        table.codes,
        op.out,
        width,
        abi.F8 if table.scheme.grid is E4M3 else abi.U8,
        table.out_features,
        scales=table.scales,
        zeros=table.zeros,
        group=table.scheme.group_width(width),
        zero=table.scheme.zero,
        scale=op.scale,
        first=op.first,
    )


def tile_lora(op: Lora) -> TiledLora:
    slots = op.slots
    columns = torch.tensor(slots.parts, dtype=torch.int32)
    return TiledLora(
        op.x, op.out, slots.table, columns, op.x.shape[1], op.out.stride(0), len(slots.parts), slots.max_rank
    )
