"""Trellis codes (Tseng et al., QTIP, arXiv 2406.11235): streams in which neighbours share bits.

The outputs of one input are rings of ``RING``. A weight adds a symbol of its bits to the ring. Its state is the last
``STATE_BITS`` bits of the ring up to there, and a hash of the state gives its code. So a weight of few bits chooses
among thousands of codes, whose numbers lie as those of a normal distribution do, and its neighbours pay for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.grid import TRELLIS
from qserve.checkpoint.words import pack_words, unpack_words

RING = TRELLIS.ring
STATE_BITS = 12
LANES = 16
"""Outputs of a tile: a quarter of a ring."""
_QUARTERS = RING // LANES
# Chosen among 75 of its kind by the error that is left of a normal distribution.
FACTOR = 22929


def codes_of_states(states: Tensor) -> Tensor:
    """int32 in [0, 2 ** STATE_BITS) -> uint8 of the same shape, 0 to 60: the four nibbles of a product, added."""
    product = states * FACTOR
    nibbles = (product & 15) + ((product >> 4) & 15) + ((product >> 8) & 15) + ((product >> 12) & 15)
    return nibbles.to(torch.uint8)


def states_of_symbols(symbols: Tensor, bits: int) -> Tensor:
    """uint8 [..., RING], symbols of ``bits`` bits -> int32 of the same shape, the newest symbol in the highest bits."""
    states = torch.zeros(symbols.shape, dtype=torch.int32, device=symbols.device)
    for back in range(STATE_BITS // bits):
        states |= symbols.roll(back, -1).int() << (STATE_BITS - bits * (back + 1))
    return states


@dataclass(frozen=True)
class PackedTrellis:
    """uint8 [out, in], codes of trellises of ``bits`` bits, as their streams.

    streams  uint8 [tiles, in, 2 * bits]: the symbols of 16 outputs and one input, the first in the lowest bits. Four
             tiles, from a multiple of four on, are a ring
    tiles    int64: these of the tiles, in this order; None for all in turn
    outputs  of all those tiles, the last of which may be short
    """

    streams: Tensor
    bits: int
    outputs: int
    tiles: Tensor | None = None

    @classmethod
    def of_symbols(cls, symbols: Tensor, bits: int, outputs: int) -> PackedTrellis:
        """``symbols`` uint8 [rings, in, RING]."""
        rings, inputs, _ = symbols.shape
        packed = pack_words(symbols.reshape(-1, RING), bits).view(torch.uint8)
        streams = packed.view(rings, inputs, _QUARTERS, 2 * bits).transpose(1, 2).reshape(-1, inputs, 2 * bits)
        return cls(streams.contiguous(), bits, outputs)

    @property
    def inputs(self) -> int:
        return int(self.streams.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def __getitem__(self, rows: Tensor) -> PackedTrellis | Tensor:
        """The outputs ``rows`` (int64) in their order: as streams where they are whole tiles."""
        lanes = rows.view(-1, LANES) if len(rows) % LANES == 0 else rows[:, None]
        if not torch.equal(lanes, lanes[:, :1] // LANES * LANES + torch.arange(LANES)):
            return self.unpack()[rows]
        tiles = lanes[:, 0] // LANES
        return replace(self, tiles=tiles if self.tiles is None else self.tiles[tiles], outputs=len(rows))

    def to(self, device: torch.device) -> PackedTrellis:
        """The same codes in the memory of ``device``."""
        tiles = None if self.tiles is None else self.tiles.to(device)
        return replace(self, streams=self.streams.to(device), tiles=tiles)

    def joins(self, other: object) -> bool:
        """Whether the outputs of ``other`` can follow these."""
        return (
            isinstance(other, PackedTrellis)
            and (self.bits, self.inputs) == (other.bits, other.inputs)
            and self.outputs % LANES == 0
        )

    def join(self, others: Sequence[PackedTrellis]) -> PackedTrellis:
        """These outputs and those of ``others``, one behind the other. All but the last are whole tiles."""
        parts = [self, *others]
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part.streams))
        tiles = torch.cat([part.tile_numbers() + start for part, start in zip(parts, starts, strict=False)])
        streams = torch.cat([part.streams for part in parts])
        return PackedTrellis(streams, self.bits, sum(part.outputs for part in parts), tiles)

    def tile_numbers(self) -> Tensor:
        """int64 [tiles]: which tile of ``streams`` each is."""
        count = -(-self.outputs // LANES)
        return torch.arange(count, device=self.streams.device) if self.tiles is None else self.tiles

    def unpack(self) -> Tensor:
        """uint8 [out, in] in memory of its own."""
        streams = self.streams.view(-1, _QUARTERS, self.inputs, 2 * self.bits)
        codes = torch.empty(len(streams), RING, self.inputs, dtype=torch.uint8, device=streams.device)
        for ring, place in zip(streams, codes, strict=True):  # new memory is only that of the result
            words = ring.transpose(0, 1).reshape(self.inputs, -1).contiguous().view(torch.int32)
            states = states_of_symbols(unpack_words(words, self.bits, RING), self.bits)
            place.copy_(codes_of_states(states).t())
        return codes.view(-1, LANES, self.inputs)[self.tile_numbers()].flatten(0, 1)[: self.outputs].contiguous()

    def linked(self) -> tuple[Tensor, Tensor]:
        """These tiles, and behind them those that only precede one of them; and int32, for each of the former, which
        of all precedes it in its ring."""
        tiles = self.tile_numbers()
        before = tiles // _QUARTERS * _QUARTERS + (tiles + _QUARTERS - 1) % _QUARTERS
        needed = torch.cat([tiles, before[~torch.isin(before, tiles)].unique()])
        places = torch.zeros(len(self.streams), dtype=torch.int32)
        places[needed] = torch.arange(len(needed), dtype=torch.int32)
        return needed, places[before]


def whole_rings(outputs: Tensor) -> Tensor:
    """[out, n] -> [rings * RING, n], padded with zeros."""
    return F.pad(outputs, (0, 0, 0, -len(outputs) % RING))
