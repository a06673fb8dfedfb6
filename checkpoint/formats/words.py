"""Values of a few bits in 32-bit words: one little-endian bit stream, the first value in the lowest bits.

At 3 and 6 bits some values cross the end of a word. The code works on bytes and assumes little-endian words, as on
every processor that this runs on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def period(bits: int, unit: int = 32) -> tuple[int, int]:
    """(values, units): the smallest run of values that fills whole units of ``unit`` bits."""
    total = math.lcm(bits, unit)
    return total // bits, total // unit


def words_for(count: int, bits: int) -> int:
    """32-bit words that hold ``count`` values."""
    return -(-count * bits // 32)


def pack_words(values: Tensor, bits: int) -> Tensor:
    """uint8 [n, m] -> int32 [n, words_for(m)], packed row by row; what is left of a row's last word is 0."""
    count, size = period(bits, 8)
    rows, columns = values.shape
    runs = _padded(values, count).view(rows, -1, count)
    packed = torch.zeros(rows, runs.shape[1], size, dtype=torch.uint8)
    for index in range(count):
        byte, shift = divmod(index * bits, 8)
        packed[..., byte] |= runs[..., index] << shift
        if shift + bits > 8:
            packed[..., byte + 1] |= runs[..., index] >> (8 - shift)
    stream = packed.view(rows, -1)[:, : 4 * words_for(columns, bits)]
    return _padded(stream, 4).reshape(-1).view(torch.int32).view(rows, -1)


def unpack_words(packed: Tensor, bits: int, columns: int) -> Tensor:
    """int32 [n, words_for(columns)] -> uint8 [n, columns]: the inverse of ``pack_words``."""
    count, size = period(bits, 8)
    rows = len(packed)
    runs = _padded(packed.contiguous().view(torch.uint8), size).view(rows, -1, size)
    values = torch.empty(rows, runs.shape[1], count, dtype=torch.uint8)
    for index in range(count):
        byte, shift = divmod(index * bits, 8)
        value = runs[..., byte] >> shift
        if shift + bits > 8:
            value |= runs[..., byte + 1] << (8 - shift)
        values[..., index] = value & ((1 << bits) - 1)
    return values.view(rows, -1)[:, :columns].contiguous()


def _padded(values: Tensor, multiple: int) -> Tensor:
    """[n, m] with zeros at the end of each row, contiguous."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % multiple)).contiguous()
