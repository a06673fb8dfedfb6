"""Values of a few bits in 32-bit words: one little-endian bit stream, the first value in the lowest bits.

Knows bits; does not know what the values mean. At 3 and 6 bits some values cross a word's end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def period(bits: int) -> tuple[int, int]:
    """(values, words): the smallest run of values that fills whole 32-bit words."""
    total = math.lcm(bits, 32)
    return total // bits, total // 32


def words_for(count: int, bits: int) -> int:
    """32-bit words that hold ``count`` values."""
    return -(-count * bits // 32)


def pack_words(values: Tensor, bits: int) -> Tensor:
    """uint8 [n, m] -> int32 [words_for(n), m], packed along the first dimension; what is left of the last word is 0."""
    count, words = period(bits)
    rows, columns = values.shape
    runs = -(-rows // count)
    packed = torch.zeros(runs, words, columns, dtype=torch.int64)
    for index in range(min(count, rows)):
        word, shift = divmod(index * bits, 32)
        value = values[index::count].to(torch.int64)
        packed[: len(value), word] |= value << shift
        if shift + bits > 32:
            packed[: len(value), word + 1] |= value >> (32 - shift)
    packed &= 0xFFFFFFFF
    # Two's complement: what exceeds int32 wraps to the negative numbers.
    signed = (packed - ((packed >> 31) << 32)).to(torch.int32).reshape(-1, columns)
    return signed[: words_for(rows, bits)].contiguous()


def unpack_words(packed: Tensor, bits: int, rows: int) -> Tensor:
    """int32 [words_for(rows), m] -> uint8 [rows, m]: the inverse of ``pack_words``."""
    count, words = period(bits)
    stored, columns = packed.shape
    runs = -(-rows // count)
    if stored < runs * words:
        packed = torch.cat([packed, packed.new_zeros(runs * words - stored, columns)])
    source = packed.reshape(runs, words, columns)
    values = torch.empty(runs, count, columns, dtype=torch.uint8)
    mask = (1 << bits) - 1
    for index in range(count):
        word, shift = divmod(index * bits, 32)
        # The arithmetic shift drags the sign in from the left; the mask keeps only what this word holds.
        value = (source[:, word] >> shift) & min(mask, (1 << (32 - shift)) - 1)
        if shift + bits > 32:
            value = value | ((source[:, word + 1] << (32 - shift)) & mask)
        values[:, index] = value.to(torch.uint8)
    return values.reshape(-1, columns)[:rows]
