"""From canonical weights to the operands of the Triton kernels. Done once, at load; nothing of it is on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import E2M1, TRELLIS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.trellis import LANES, RING, STATE_BITS, PackedTrellis

PAD_N = 128
"""Outputs are padded to a multiple of this, so that no kernel needs a bounds check on weights."""
PAD_STREAMS = 256
"""The same for streams of trellis codes, of which the padding takes no memory."""
SLICES = (64, 32, 16)
"""Inputs to a plane, best first: 64 of two bytes are a line of the cache."""
_HALF = 1 << 16


@dataclass(frozen=True)
class Planes:
    """Integer weights as ``weight_only_kernel`` reads them, or streams of trellis codes as ``trellis_kernel`` does.

    words   int16 [blocks, padded outputs, slice]; numbers where ``bits`` is 16. Of streams, ``bits`` rows for each tile
            of 16 outputs: [blocks, bits * tiles, slice]
    scales  int32 or float32 [groups or pairs of groups, padded outputs], as ``scales_kind`` says
    zeros   float32 in the shape of float32 scales, where they are not constant
    order   int32 [k]: the column of x behind each input, -1 for padding; or None
    group   inputs that share a scale, 0 for all; ``k`` counts inputs, with padding where ``order`` holds it
    zero    the zero point, -1 where it varies, or -2 where fields are e2m1 numbers
    places  of streams, int32 [2, padded outputs / 8]: for 8 outputs the bit of a block, of 16 to a row, where the first
            one's window begins, and the row that follows it; None for fields
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    scales_kind: str
    bits: int
    slice: int
    group: int
    k: int
    zero: int
    places: Tensor | None = None

    @property
    def block_k(self) -> int:
        """Inputs to a block."""
        return self.slice if self.places is not None else 16 // self.bits * self.slice

    @property
    def blocks(self) -> int:
        return int(self.words.shape[0])

    @property
    def padded_n(self) -> int:
        return int(self.words.shape[1] if self.places is None else 8 * self.places.shape[1])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _shape(width: int, groups: int, k: int, planes: int) -> tuple[int, int, int]:
    """(slice, group, padded k) for groups of ``width`` inputs: the least padding, then the widest slice.

    A plane lies in one group, and a block holds whole groups or lies in one. Wide slices are for wide groups: a
    kernel holds the words and scales of a whole block in registers.
    """
    choices = []
    for size in SLICES:
        block = planes * size
        if groups > 1 and size > max(32, 2 * width // planes):
            continue
        group = size
        while group < min(width, block):
            group *= 2
        group = group if width <= block else round_up(width, block)
        padded = round_up(k if groups == 1 or group == width else groups * group, block)
        choices.append((padded, -size, group))
    padded, negative, group = min(choices)
    return -negative, group, padded


def slots(packed: QuantizedWeight, group: int) -> Tensor | None:
    """int64 [groups * group]: the input in each slot of groups of ``group`` slots, -1 for an empty slot.

    None where the inputs already lie in their slots.
    """
    width, groups = packed.scheme.group_width(packed.in_features), packed.scheme.groups(packed.in_features)
    if groups == 1 or (packed.g_idx is None and group == width):
        return None
    member = packed.group_of_input().cpu()
    counts = torch.bincount(member, minlength=groups)
    columns = torch.argsort(member, stable=True)
    starts = torch.cumsum(counts, 0) - counts
    rank = torch.arange(len(columns)) - starts[member[columns]]
    slot = torch.full((groups * group,), -1, dtype=torch.int64)
    slot[member[columns] * group + rank] = columns
    return slot


def field_bits(scheme: WeightScheme) -> int:
    """Of the field that holds a code."""
    return 4 if scheme.max_code < 16 else 8


def planes(packed: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> Planes:
    """A packed weight of integers, e2m1 numbers or trellis codes, for inputs of ``dtype``."""
    streams = packed.stored if isinstance(packed.stored, PackedTrellis) else None
    bits = field_bits(packed.scheme) if streams is None else streams.bits
    count = 16 // bits if streams is None else 1
    groups = packed.scheme.groups(packed.in_features)
    width = packed.scheme.group_width(packed.in_features)
    size, group, k = _shape(width, groups, packed.in_features, count)
    rows = round_up(packed.out_features, PAD_N if streams is None else PAD_STREAMS)
    order = slots(packed, group)
    if order is not None:
        order = F.pad(order, (0, k - len(order)), value=-1).to(device)
    places = None
    if streams is None:
        words = _words(packed.codes.to(device), order, rows, k, bits, size)
    else:
        words, places = _streams(streams, order, rows, k, size, device)
    scales, zeros, kind = _scales(packed, rows, 1 if groups == 1 else -(-k // group), count * size // group, dtype)
    return Planes(
        words=words,
        scales=scales.to(device),
        zeros=None if zeros is None else zeros.to(device),
        order=None if order is None else order.to(torch.int32),
        scales_kind=kind,
        bits=bits,
        slice=size,
        group=0 if groups == 1 else group,
        k=packed.in_features if order is None else k,
        zero=-2 if packed.scheme.grid is E2M1 else packed.scheme.zero if packed.zeros is None else -1,
        places=places,
    )


def _words(codes: Tensor, order: Tensor | None, rows: int, k: int, bits: int, size: int) -> Tensor:
    """Codes [out, in] as the words of ``Planes``."""
    if order is not None:
        codes = torch.where(order < 0, 0, codes[:, order.clamp_min(0)])
    codes = F.pad(codes, (0, k - codes.shape[1], 0, rows - len(codes)))
    count = 16 // bits
    fields = codes.view(rows, -1, count, size).to(torch.int32)
    words = torch.zeros_like(fields[:, :, 0])
    for plane in range(count):
        words |= fields[:, :, plane] << (bits * plane)
    return _wrapped(words, torch.int16).transpose(0, 1).contiguous()


def _streams(
    packed: PackedTrellis, order: Tensor | None, rows: int, k: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The words and the places of ``Planes``. An input behind the last has any weight."""
    needed, before = padded_outputs(packed, rows).linked()
    held, at = needed.unique(return_inverse=True)
    tiles, bits = packed.streams[held].view(torch.int16).to(device), packed.bits
    if order is not None:
        tiles = tiles[:, order.clamp_min(0)]
    words = F.pad(tiles, (0, 0, 0, k - tiles.shape[1])).view(len(held), -1, size, bits)
    # A window ends with its own symbol; that of the first output of a tile begins in the tile before.
    begins = torch.tensor([LANES, LANES // 2]) * bits + bits - STATE_BITS
    first = torch.stack([at[before.long()], at[: len(before)]], 1) * (LANES * bits) + begins
    second = torch.stack([at[: len(before)] * bits, first[:, 1] // 16 + 1], 1)
    places = torch.stack([first.flatten(), second.flatten()])
    return words.permute(1, 0, 3, 2).reshape(-1, len(held) * bits, size).contiguous(), places.to(device, torch.int32)


def padded_outputs(packed: PackedTrellis, rows: int) -> PackedTrellis:
    """The same with ``rows`` outputs, whole tiles, of which those behind the last have any codes."""
    tiles = packed.tile_numbers()
    more = tiles[-1:].expand(rows // LANES - len(tiles))
    return replace(packed, outputs=rows, tiles=torch.cat([tiles, more]))


def dense_planes(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Planes:
    """A dense weight [out, in] as planes of one number to a word, which has the type of the inputs."""
    size = SLICES[0]
    out, k = weight.shape
    padded = F.pad(weight.to(device, dtype), (0, -k % size, 0, -out % PAD_N))
    words = padded.view(len(padded), -1, size).transpose(0, 1).contiguous()
    return Planes(words, words.new_empty(0, dtype=torch.float32), None, None, "float", 16, size, 0, k, 0)


def plane_bytes(scheme: WeightScheme, out: int, inp: int) -> int:
    """Bytes of ``planes`` of a weight [out, in] without ``order``: an upper bound, with scales in float32."""
    streams, groups = scheme.grid is TRELLIS, scheme.groups(inp)
    bits = scheme.bits if streams else field_bits(scheme)
    _, group, k = _shape(scheme.group_width(inp), groups, inp, 1 if streams else 16 // bits)
    scales = 4 * (1 if groups == 1 else -(-k // group))
    if streams:  # and one byte for the places of an output
        return round_up(out, RING) * k * bits // 8 + round_up(out, PAD_STREAMS) * (scales + 1)
    return round_up(out, PAD_N) * (k * bits // 8 + scales * (1 if scheme.symmetric else 2))


def _wrapped(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The low bits of integers, as signed integers of ``dtype``."""
    bits = torch.iinfo(dtype).bits
    return torch.where(words >= 1 << (bits - 1), words - (1 << bits), words).to(dtype)


def by_group(values: Tensor, rows: int, groups: int) -> Tensor:
    """[out, groups] -> float32 [groups padded, rows], contiguous, padded with zeros."""
    padded = F.pad(values.float(), (0, groups - values.shape[1], 0, rows - values.shape[0]))
    return padded.t().contiguous()


def _scales(
    packed: QuantizedWeight, rows: int, groups: int, per_block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, str]:
    """(scales, zeros, kind): in 16 bits where that loses nothing."""
    scales = by_group(packed.scales, rows, groups)
    zeros = None if packed.zeros is None else by_group(packed.zeros, rows, groups)
    halves = scales.half()
    exact = bool((halves.float() == scales).all())
    paired = zeros is not None or (per_block > 0 and per_block % 2 == 0)
    if packed.scheme.groups(packed.in_features) == 1 or not exact or not paired or dtype == torch.float32:
        return scales, zeros, "float"
    low = halves.view(torch.int16).long() % _HALF
    if zeros is None:
        return _wrapped(low[::2] + low[1::2] * _HALF, torch.int32), None, "pairs"
    high = zeros.to(dtype).view(torch.int16).long() % _HALF
    return _wrapped(low + high * _HALF, torch.int32), None, "zeros"
