"""Values of a few bits in 32-bit words: one little-endian bit stream, the first value in the lowest bits.

At 3, 5 and 6 bits some values cross the end of a word. The code works on bytes and assumes little-endian words, as on
every processor that this runs on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORDS = 1 << 16
"""How many words are unpacked at a time."""


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
    if bits == 4:
        return _unpack_nibbles(packed)[:, :columns].contiguous()
    runs = _padded(packed.contiguous().view(torch.uint8), size).view(rows, -1, size)
    values = torch.empty(rows, runs.shape[1], count, dtype=torch.uint8, device=packed.device)
    for index in range(count):
        byte, shift = divmod(index * bits, 8)
        value = runs[..., byte] >> shift
        if shift + bits > 8:
            value |= runs[..., byte + 1] << (8 - shift)
        values[..., index] = value & ((1 << bits) - 1)
    return values.view(rows, -1)[:, :columns].contiguous()


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """The two values of a byte become the bytes of a little-endian int16. A few rows at a time: what is made on the way
    stays in the cache, and new memory is only that of the result."""
    rows, words = packed.shape
    values = torch.empty(rows, 4 * words, dtype=torch.int16, device=packed.device)
    step = max(1, _WORDS // max(1, words))
    for part, out in zip(packed.split(step), values.split(step), strict=True):
        pairs = part.contiguous().view(torch.uint8).to(torch.int16)
        torch.bitwise_and(pairs.bitwise_or_(pairs << 4), 0x0F0F, out=out)
    return values.view(torch.uint8)


def _padded(values: Tensor, multiple: int) -> Tensor:
    """[n, m] with zeros at the end of each row, contiguous."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % multiple)).contiguous()
