"""From canonical weights to the tiles that the C kernels read. Done once, at load; nothing of it is on disk.

The layouts are those of ``csrc/qserve.h``: 16 output rows to a tile, the last tile padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp, gcd

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import E4M3, TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.checkpoint.trellis import PackedTrellis
from qserve.kernels.code_tiles import LANES, Tile, tile_codes_reference

_ONE_BYTE = 31  # the largest number of a codebook of one byte
_TOPS = (448.0, 256.0, 416.0, 384.0, 352.0, 320.0, 288.0, 240.0)  # the largest e4m3 number of each significand
_SAMPLE = 16  # scales of a row by which its factor is chosen
_LAST_BITS = 1e-6
_CODES = 1 << 18  # that are rounded at a time

Take = Callable[[Sequence[int], torch.dtype], Tensor]
"""Gives an uninitialized tensor where tiles stay."""


@dataclass(frozen=True)
class IntTiles:
    """A packed weight as tiles.

    weight uint8; scales [tiles, groups, 16], and zeros of the same shape or None: float16 where that holds all of both
    exactly (as most checkpoints store them), else float32; permutation int32 [k], the column of x behind each input (-1
    for padding), or None. A code stands for (code - zero - zeros) * scale. Scales count times row_scales, float32
    [tiles, 16], where there are such; then they may be float8_e4m3fn without sign, of which a 256th counts. Those of
    NVFP4 and MXFP4 are held so.
    ``group`` inputs share a weight scale, ``act_group`` inputs are summed as integers, and ``act_span`` inputs share an
    activation scale. ``codebook``, uint8 [bytes, 16] with low bytes first: the numbers for which codes stand, or None.
    ``before``, int32 [tiles], of a trellis: which tile precedes each; None for codes, which are of ``bits``, 4 or 8.
    ``code_bits``: of a trellis its bits, else those of the largest code.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    permutation: Tensor | None
    k: int
    bits: int
    group: int
    act_group: int
    act_span: int
    zero: int
    code_bits: int
    codebook: Tensor | None = None
    row_scales: Tensor | None = None
    before: Tensor | None = None


def _tiles_of_rows(values: Tensor) -> Tensor:
    """[out, n] -> [tiles, n, 16], contiguous, padded with zeros."""
    out, n = values.shape
    padded = F.pad(values, (0, 0, 0, -out % LANES))
    return padded.view(-1, LANES, n).transpose(1, 2).contiguous()


def float_tiles(weight: Tensor) -> Tensor:
    """[out, in] float32, float16 or bfloat16 -> [tiles, in, 16] of the same dtype."""
    return _tiles_of_rows(weight.contiguous())


def rows_of_tiles(tiles: Tensor, rows: int) -> Tensor:
    """The inverse of ``float_tiles`` for a weight of so many ``rows``."""
    return tiles.transpose(1, 2).flatten(0, 1)[:rows]


def float8_tiles(packed: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """An fp8 weight as the bytes of e4m3 [tiles, in, 16], and its scales float32 [tiles, groups, 16]."""
    return _tiles_of_rows(packed.codes), _tiles_of_rows(packed.scales.float())


def is_expanded(scheme: WeightScheme, activations: ActivationScheme | None) -> bool:
    """Whether no kernel multiplies the packed weight, so it is held in float32: integer weights, e4m3 inputs."""
    return scheme.grid.exact and activations is not None and activations.grid is E4M3


def tile_bytes(
    scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int, *, narrow_scales: bool = False
) -> int:
    """Bytes of a packed weight [out, in] as the kernels hold it, without padding. ``narrow_scales``: 16 bits hold its
    scales and zero points, or 8 where it is stored with such, which is not known before they are read; False gives the
    upper bound."""
    if is_expanded(scheme, activations):
        return 4 * out * inp
    codes = out * inp * (4 if scheme.bits <= 4 else 8) // 8
    if scheme.grid is TRELLIS:
        codes = -(-out // TRELLIS.ring) * TRELLIS.ring * inp * scheme.bits // 8
    groups = out * scheme.groups(inp)
    if narrow_scales and scheme.grid.scale_bits == 8:
        return codes + groups + 4 * out
    halves = narrow_scales and scheme.grid.exact and frexp(scheme.grid.unit)[0] == 0.5  # times a power of two
    return codes + groups * (2 if halves else 4) * (1 if scheme.symmetric else 2)


def _spans(width: int, bits: int, activations: ActivationScheme | None) -> tuple[int, int, int]:
    """(group, act_group, act_span) for weight groups of ``width`` inputs; the span is 0 for a whole token.

    Inputs that no scheme rounds share a scale by 64, or by 32 where the weights have more than 4 bits: there most of
    the error comes from rounding the inputs (five sixths for an output head). An odd width, which only weights per
    channel have, is padded to a multiple of the activation group.
    """
    if activations is not None and activations.granularity != "group":
        group = -(-width // 8) * 8
        return group, group, 0
    widest = (64 if bits <= 4 else 32) if activations is None else activations.group_size
    act_group = gcd(width, widest)
    if act_group < 8:
        act_group = gcd(8 if width < 32 else 32, widest)
    return -(-width // act_group) * act_group, act_group, act_group if activations is None else widest


def anywhere(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def kept(take: Take, tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` where ``take`` says."""
    return take(tensor.shape, tensor.dtype).copy_(tensor)


def int_tiles(packed: QuantizedWeight, take: Take = anywhere, tile: Tile = tile_codes_reference) -> IntTiles:
    """Tiles of 4-bit nibbles for up to 4 bits, of bytes above. The codebook of an exact grid is one of integers: the
    multiples of its unit, which the scales take up. They are lifted by ``zero``, so that none is negative. Zero points
    that are real numbers stay such: the kernel computes (code - zero) * scale, and does not round in between as
    ``dequantize`` may.

    Inputs are reordered where groups are not consecutive, and padded where groups are short, so that every group has
    the same width and holds a whole number of activation groups. Without an activation scheme, inputs get scales of
    their own, see ``_spans``.
    """
    width = packed.scheme.group_width(packed.in_features)
    held = packed.scheme.max_code.bit_length()
    group, act_group, act_span = _spans(width, held, packed.activations)
    order: Tensor | None = None
    groups = packed.scheme.groups(packed.in_features)
    needs_order = packed.g_idx is not None or group * groups != packed.in_features
    if needs_order:
        order = _slots(packed.group_of_input(), groups, group)
    k = packed.in_features if order is None else len(order)
    bits, before = 4 if held <= 4 else 8, None
    grid, book, zero = packed.scheme.grid, None, packed.scheme.zero
    if grid.codebook is not None:
        levels = (torch.tensor(grid.codebook) / grid.unit).round().int()
        zero = -int(levels.min())
        levels += zero
        book = torch.stack([levels & 255, levels >> 8] if int(levels.max()) > _ONE_BYTE else [levels]).to(torch.uint8)
    elif grid.real_zeros:
        zero = 0
    # In this order: at the end of the preceding weights, the prefetch runs into these scales.
    values, unit, row_scales = packed.scales, grid.unit, None
    if grid.scale_bits == 8:
        values, rows = _by_row(values)
        row_scales, unit = _tile_rows(rows, torch.float32, take, unit).flatten(1), 1.0
    dtype = _narrowest(values, unit)
    if packed.zeros is not None and grid.real_zeros:
        dtype = torch.promote_types(dtype, _narrowest(packed.zeros))
    scales = _tile_rows(values, dtype, take, unit)
    zeros = None
    if packed.zeros is not None:  # beside `zero`, so that they are small
        zeros = _tile_rows(packed.zeros if grid.real_zeros else packed.zeros.float() - zero, dtype, take)
    if isinstance(packed.stored, PackedTrellis) and order is None:
        tiles, before = packed.stored.linked()
        held, weight = packed.scheme.bits, take((len(tiles), *packed.stored.streams.shape[1:]), torch.uint8)
        torch.index_select(packed.stored.streams, 0, tiles, out=weight)
    else:
        weight = take((-(-packed.out_features // LANES), k * bits // 32, LANES, 4), torch.uint8)
        tile(packed.stored, order, weight)
    return IntTiles(
        weight=weight,
        scales=scales,
        zeros=zeros,
        permutation=None if order is None else kept(take, order.to(torch.int32)),
        k=k,
        bits=bits,
        group=group,
        act_group=act_group,
        act_span=act_span or k,
        zero=zero,
        code_bits=held,
        codebook=book,
        row_scales=row_scales,
        before=None if before is None else kept(take, before),
    )


def _slots(member: Tensor, groups: int, width: int) -> Tensor:
    """int64 [groups * width]: the inputs of each group in their order, -1 where it has fewer. ``member`` int64 [in]."""
    count = member.bincount(minlength=groups)
    if int(count.max()) > width:
        raise ValueError(f"a group holds {int(count.max())} inputs, more than the group size {width}")
    columns = member.argsort(stable=True)
    of_group = torch.arange(len(member)) - (count.cumsum(0) - count)[member[columns]]
    slots = torch.full((groups * width,), -1)
    slots[member[columns] * width + of_group] = columns
    return slots


def _rows(values: Tensor) -> int:
    """Whole tiles of rows that stay in the cache."""
    return max(1, _CODES // (LANES * values.shape[1])) * LANES


def _narrowest(values: Tensor, unit: float = 1) -> torch.dtype:
    """Which type holds ``values`` times ``unit``."""
    if values.dtype == torch.float8_e4m3fn:
        return values.dtype
    parts = values.split(_rows(values))
    halves = all(torch.equal((part * unit).half().float(), (part * unit).float()) for part in parts)
    return torch.float16 if halves else torch.float32


def _by_row(scales: Tensor) -> tuple[Tensor, Tensor]:
    """[out, groups] and float32 [out, 1], whose products are ``scales`` but for their last bits: for each row a 256th
    of e4m3 numbers without sign, and a factor, if it has such, else the scales and 1. Where all rows have such, the
    former are float8_e4m3fn and 256 times as large, otherwise float32. The largest of a row is one of eight numbers, as
    its significand says; the rest must fit to it."""
    numbers, factors, fitting = [], [], []
    for part in scales.split(_rows(scales)):
        largest = part.amax(1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1.0)
        factor, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
        for top in _TOPS:
            some = part[:, :_SAMPLE] * (top / largest)
            off = _off(some, some.to(torch.float8_e4m3fn))
            factor, least = torch.where(off < least, largest / top, factor), off.minimum(least)
        number = part / factor
        eight = number.to(torch.float8_e4m3fn)
        fits = (_off(number, eight) < _LAST_BITS) & (part.amin(1, keepdim=True) >= 0)
        numbers.append(eight)
        factors.append(torch.where(fits, factor * 256, 1.0))
        fitting.append(fits)
    found, fits = torch.cat([each.view(torch.uint8) for each in numbers]) & 0x7F, torch.cat(fitting)
    eight = found.view(torch.float8_e4m3fn)
    return eight if bool(fits.all()) else torch.where(fits, eight.float() / 256, scales), torch.cat(factors)


def _off(numbers: Tensor, eight: Tensor) -> Tensor:
    """[out, 1]: how far ``numbers`` of a row at most are from those in ``eight`` bits, relative to them."""
    return (eight.float() - numbers).abs_().div_(numbers.clamp_min(1e-9)).amax(1, keepdim=True)


def _tile_rows(values: Tensor, dtype: torch.dtype, take: Take, unit: float = 1) -> Tensor:
    """[out, n] -> [tiles, n, 16], times ``unit``, as ``float_tiles``. Some at a time: new memory is only that of the
    result."""
    rows, n = _rows(values), values.shape[1]
    tiles = take((-(-len(values) // LANES), n, LANES), dtype)
    for part, place in zip(values.split(rows), tiles.split(rows // LANES), strict=True):
        place.copy_(_tiles_of_rows((part if unit == 1 else part * unit).to(dtype)))
    return tiles
