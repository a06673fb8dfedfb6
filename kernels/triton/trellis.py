"""Trellis codes (``checkpoint.trellis``) of a tile of weights, from the streams of their tiles of 16 outputs.

A program decodes octets: 8 outputs that follow each other, for a slice of inputs. Their windows lie in two or three
words of 16 bits, of which the first may belong to the tile before. Each thread decodes whole octets: output ``j`` of
octet ``i`` is column ``j * octets + i`` of the product, so that nothing is shuffled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def outputs(COUNT: tl.constexpr):
    """int32 [COUNT]: the output behind each column, for COUNT outputs."""
    columns = tl.arange(0, COUNT)
    return columns % (COUNT // 8) * 8 + columns // (COUNT // 8)


@triton.jit
def rows(before, output, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Of the octets from ``output`` on, a multiple of 16: the row of the first word, that of the second, which others
    follow, and where the first window begins. int32 [COUNT // 8] each.

    ``before``: int32, the tile that precedes each tile; a tile is BITS rows of words.
    """
    octets = output // 8 + tl.arange(0, COUNT // 8)
    tile, upper = octets // 2, octets % 2
    WORD: tl.constexpr = (9 * BITS - 12) // 16  # where the windows of the upper octet begin
    first = tl.where(upper == 0, tl.load(before + tile) * BITS + BITS - 1, tile * BITS + WORD)
    return first, tile * BITS + upper * (WORD + 1), (BITS + 4 + upper * (8 * BITS)) % 16


@triton.jit
def codes(block, first, then, begin, BITS: tl.constexpr, SLICE: tl.constexpr, SWAP: tl.constexpr):
    """int16 codes [SLICE, outputs], or [outputs, SLICE] if SWAP, of the words from ``block`` on.

    ``first``, ``then``: places of words, [SLICE, octets] or [octets, SLICE]; ``begin`` broadcasts to them."""
    KIND: tl.constexpr = tl.uint32 if BITS == 2 else tl.uint64
    stream = _word(block + first).to(KIND) | (_word(block + then).to(KIND) << 16)
    if BITS > 2:
        stream |= _word(block + then + SLICE).to(KIND) << 32
    stream = stream >> begin.to(KIND)
    shift = (tl.arange(0, 8) * BITS).to(KIND)
    if SWAP:
        windows = tl.reshape(stream[None, :, :] >> shift[:, None, None], (8 * stream.shape[0], SLICE))
    else:
        windows = tl.reshape(stream[:, None, :] >> shift[None, :, None], (SLICE, 8 * stream.shape[1]))
    return code(windows.to(tl.uint32) & 0xFFF)


@triton.jit
def _word(place):
    return tl.load(place).to(tl.uint16, bitcast=True)


@triton.jit
def code(state):
    """uint32 states -> int16 codes: ``codes_of_states``."""
    first, second = state * 61169 + 76, state * 34039
    total = (first & 255) + ((first >> 8) & 255) + (second & 255) + ((second >> 8) & 255)
    return ((total + 8) >> 4).to(tl.int16)
