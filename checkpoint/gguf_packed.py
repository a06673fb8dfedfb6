"""llama.cpp's blocks as codes, scales and zero points, so that kernels multiply them as they are stored.

Blocks of 32 numbers: a scale d in float16, or d and a minimum m, then the codes. ``Q4_0``, ``Q5_0`` and ``Q8_0`` are
d * (code - middle), ``Q4_1`` and ``Q5_1`` are d * code + m. Blocks of 256, the K kinds, hold scales of their groups in
few bits beside a d in float16: ``Q3_K`` is d * scale * (code - 4) and ``Q6_K`` d * scale * (code - 32) in groups of
16; ``Q4_K`` and ``Q5_K`` are d * scale * code - dmin * min in groups of 32. Byte j of the nibbles of a block of 32 has
the codes of numbers j and j + 16. The source is ggml's description of its own structures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.spec import WeightScheme

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes uint8 [rows, in], scales float32 [rows, groups], and zero points of that shape or None."""


@dataclass(frozen=True)
class Blocks:
    """``read`` makes the parts of uint8 [rows, blocks, bytes of a block]."""

    scheme: WeightScheme
    read: Callable[[Tensor], Parts]


def unpacked(kind: GGMLQuantizationType, raw: np.ndarray[Any, Any], rows: int, nbytes: int) -> Parts:
    """The parts of ``rows`` rows of a kind in ``KINDS``, whose blocks have ``nbytes`` bytes."""
    return KINDS[kind].read(torch.from_numpy(raw).view(rows, -1, nbytes))


def _halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """float32 [rows, blocks, count]: the float16 numbers that begin at byte ``first``."""
    return blocks[..., first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] -> [..., 2 n]: all low ones, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fifth(bits: Tensor) -> Tensor:
    """The fifth bit of 32 codes, as 16 or nothing: bit j of the little-endian bytes [..., 4] is that of number j."""
    places = torch.arange(8, dtype=torch.uint8)
    return torch.flatten((bits[..., None] >> places & 1) << 4, -2)


def _symmetric(codes: Tensor, scales: Tensor) -> Parts:
    rows = len(codes)
    return codes.reshape(rows, -1), scales.reshape(rows, -1), None


def _affine(codes: Tensor, scales: Tensor, minima: Tensor) -> Parts:
    """Of scale * code + minimum, the parts of (code - zero) * scale. A group whose scale is 0 has its minimum alone."""
    flat = scales == 0
    codes = codes.masked_fill(flat[..., None], 0)
    zeros = torch.where(flat, -1.0, -minima / torch.where(flat, 1.0, scales))
    scales = torch.where(flat, minima, scales)
    rows = len(codes)
    return codes.reshape(rows, -1), scales.reshape(rows, -1), zeros.reshape(rows, -1)


def _q8_0(blocks: Tensor) -> Parts:
    return _symmetric(blocks[..., 2:] ^ 128, _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> Parts:
    return _symmetric(_nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return _affine(_nibbles(blocks[..., 4:]), *_halves(blocks, 0, 2).unbind(-1))


def _q5_0(blocks: Tensor) -> Parts:
    return _symmetric(_nibbles(blocks[..., 6:]) + _fifth(blocks[..., 2:6]), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) + _fifth(blocks[..., 4:8])
    return _affine(codes, *_halves(blocks, 0, 2).unbind(-1))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [..., 8] of six bits in 12 bytes: four and four with their whole, then nibbles of the other
    eight, whose upper two bits are above those of the first."""
    low, high, nibbles = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (nibbles & 15) | (low >> 6 << 4)], -1)
    minima = torch.cat([high & 63, (nibbles >> 4) | (high >> 6 << 4)], -1)
    return scales, minima


def _k(blocks: Tensor, codes: Tensor) -> Parts:
    """``codes`` [rows, blocks, 8, 32] of ``Q4_K`` and ``Q5_K``, whose blocks begin alike."""
    d, dmin = _halves(blocks, 0, 2).split(1, -1)
    scales, minima = _six_bits(blocks[..., 4:16])
    return _affine(codes, d * scales, -(dmin * minima))


def _by_32(packed: Tensor) -> Tensor:
    """[..., 128] -> [..., 8, 32]: of every 32 bytes all low nibbles, then all high ones."""
    nibbles: Tensor = _nibbles(packed.unflatten(-1, (4, 32)))  # type: ignore[no-untyped-call]
    return nibbles.view(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: Tensor) -> Parts:
    return _k(blocks, _by_32(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> Parts:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> places & 1) << 4  # bit g of byte l is that of number l of group g
    return _k(blocks, _by_32(blocks[..., 48:]) + fifth)


def _q6_k(blocks: Tensor) -> Parts:
    """Of each half of 128 numbers: 64 bytes of low nibbles, and 32 bytes of four times two high bits."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _symmetric(low + high, _halves(blocks, 208) * scales)


def _q3_k(blocks: Tensor) -> Parts:
    """32 bytes of high bits, of which byte l has those of number l of each 32 numbers; 64 bytes of four times two low
    bits; 12 bytes of scales of six bits, less 32: nibbles of two each, then four times two high bits."""
    high = blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    low = (blocks[..., 32:96].unflatten(-1, (2, 1, 32)) >> places & 3).flatten(-3, -2)
    upper = (blocks[..., None, 104:108] >> places & 3).flatten(-2)
    scales = (_nibbles(blocks[..., 96:104]) | upper << 4).float() - 32
    return _symmetric(low + (high << 2), _halves(blocks, 108) * scales)


_READ = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
KINDS = {GGMLQuantizationType[name]: Blocks(GGUF_SCHEMES[name], read) for name, read in _READ.items()}
"""The kinds that kernels multiply as they are."""
