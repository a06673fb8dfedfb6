"""``PackedCodes``: the codes of a weight in the 32-bit words of a checkpoint, until something reads them.

Kernels lay them out from there. Choosing, ordering and joining outputs moves no code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from qserve.checkpoint.trellis import PackedTrellis
from qserve.checkpoint.words import unpack_words


@dataclass(frozen=True)
class PackedCodes:
    """uint8 [out, in], codes of ``bits`` bits.

    words     int32, one for each of some linears whose outputs follow each other
    nibbles   None: words are [out, words], in any strides, as ``pack_words`` makes them. Else they are [in, words], and
              nibble i of a word is the code of the output 8 * word + nibbles[i]
    rows      int64 [out], these outputs of those in ``words``; None for all in turn
    """

    words: tuple[Tensor, ...]
    bits: int
    inputs: int
    nibbles: tuple[int, ...] | None = None
    rows: Tensor | None = None

    @property
    def outputs(self) -> int:
        return sum(map(self._held, self.words)) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def __getitem__(self, rows: Tensor) -> PackedCodes:
        """The outputs ``rows`` (int64) in their order."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def to(self, device: torch.device) -> PackedCodes:
        """The same codes in the memory of ``device``."""
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, words=tuple(words.to(device) for words in self.words), rows=rows)

    def joins(self, other: object) -> bool:
        """Whether the outputs of ``other`` can follow these."""
        return isinstance(other, PackedCodes) and (self.bits, self.inputs, self.nibbles) == (
            other.bits, other.inputs, other.nibbles,
        )  # fmt: skip

    def unpack(self) -> Tensor:
        """uint8 [out, in] in memory of its own."""
        each = [self._unpack(words) for words in self.words]
        codes = each[0] if len(each) == 1 else torch.cat(each)
        return codes if self.rows is None else codes[self.rows]

    def table(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where the codes of each output lie: the address of the first word, int64 [out], how many words further the
        next is, int32 [out], and which nibble of each, uint8 [out], or None where the codes fill the words."""
        shared = 1 if self.nibbles is None else 8
        addresses, strides = [], []
        for words in self.words:
            across, along = words.stride() if self.nibbles is None else words.stride()[::-1]
            place = torch.arange(self._held(words)) // shared
            addresses.append(place * (4 * across) + words.data_ptr())
            strides.append(torch.full_like(place, along, dtype=torch.int32))
        address, stride, nibble = torch.cat(addresses), torch.cat(strides), None
        if self.nibbles is not None:
            nibble = torch.tensor(self.nibbles).argsort().to(torch.uint8).repeat(len(address) // shared)
        if (rows := self.rows) is None:
            return address, stride, nibble
        return address[rows], stride[rows], None if nibble is None else nibble[rows]

    def _held(self, words: Tensor) -> int:
        return len(words) if self.nibbles is None else words.shape[1] * 8

    def _unpack(self, words: Tensor) -> Tensor:
        if self.nibbles is None:
            return unpack_words(words, self.bits, self.inputs)
        interleaved = unpack_words(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
        values = torch.empty_like(interleaved)
        values[..., list(self.nibbles)] = interleaved
        return values.view(len(words), -1).t().contiguous()


Packed = PackedCodes | PackedTrellis


def join(parts: list[Tensor | Packed]) -> Tensor | Packed:
    """The outputs of all ``parts``, one behind the other; packed if all are, and in the same way."""
    first = parts[0]
    rings = [part for part in parts if isinstance(part, PackedTrellis)]
    if len(rings) == len(parts) and all(one.joins(next) for one, next in pairwise(rings)):
        return rings[0].join(rings[1:])
    if not isinstance(first, PackedCodes) or not all(map(first.joins, parts)):
        return torch.cat([part if isinstance(part, Tensor) else part.unpack() for part in parts])
    packed = [part for part in parts if isinstance(part, PackedCodes)]
    rows = None
    if any(part.rows is not None for part in packed):
        starts = [0]
        for part in packed:
            starts.append(starts[-1] + replace(part, rows=None).outputs)
        rows = torch.cat([torch.arange(part.outputs) + start if part.rows is None else part.rows + start
                          for part, start in zip(packed, starts)])
    return replace(first, words=tuple(words for part in packed for words in part.words), rows=rows)
