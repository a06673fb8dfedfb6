"""Weights as the blocks of llama.cpp's files, of which ``gguf_packed`` is the inverse: the very numbers, or a refusal.

Two-level scales are found again from the scales themselves: one of the integers that the greatest may be makes the
float16 of a superblock, and integers of all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.gguf_packed import KINDS
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight, in_order
from qserve.checkpoint.spec import SUPERBLOCK, WeightScheme
from qserve.checkpoint.words import pack_words

BLOCK = 32
_BITS = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q5_0: 5, GGMLQuantizationType.Q8_0: 8}


def block_type(scheme: WeightScheme, in_features: int) -> GGMLQuantizationType:
    """The smallest type that holds the numbers of ``scheme``. Raises ``CheckpointError`` where there is none."""
    for kind, blocks in KINDS.items():
        if blocks.scheme == scheme and in_features % GGML_QUANT_SIZES[kind][0] == 0:
            return kind
    if scheme.grid is not INTEGERS or scheme.scale_bits:
        raise CheckpointError(f"no block type holds {scheme} numbers of {in_features} inputs")
    if not scheme.symmetric:
        raise CheckpointError("Q4_0, Q5_0 and Q8_0 have no zero points; quantize without --asym")
    if scheme.group_width(in_features) % BLOCK or in_features % BLOCK:
        raise CheckpointError(f"{scheme} weights of {in_features} inputs are no blocks of {BLOCK}; use --group-size 32")
    return next(kind for kind, bits in _BITS.items() if bits >= scheme.bits)


def pack_blocks(weight: QuantizedWeight) -> np.ndarray[Any, Any]:
    """uint8 [out, bytes of a row]: the very numbers of ``weight``. Raises ``CheckpointError`` where blocks would change
    them."""
    kind = block_type(weight.scheme, weight.in_features)
    if in_order(weight).g_idx is not None:
        raise CheckpointError("its groups are not consecutive inputs; quantize without --act-order of other tools")
    if weight.scheme.scale_bits:
        blocks = _SUPERBLOCKS[kind.name](weight)
    elif weight.scheme.grid.real_zeros:
        blocks = _with_minimum(weight)
    else:
        blocks = _symmetric(weight, kind)
    return blocks.reshape(weight.out_features, -1).numpy()


def _bytes(halves: Tensor) -> Tensor:
    """uint8 [..., 2 n] of float16 [..., n]."""
    return halves.contiguous().view(torch.uint8)


def _halves(numbers: Tensor) -> Tensor:
    """float16 of float32, without a change."""
    halves = numbers.half()
    if not bool(torch.isfinite(halves).all()):
        raise CheckpointError("a scale does not fit float16")
    if not torch.equal(halves.float(), numbers):
        raise CheckpointError("its scales would be rounded to float16; quantize with --format gptq")
    return halves


def _in_32(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., 32] -> the bytes of 4 bits, or of 5, whose highest come first."""
    parts = []
    if bits == 5:
        parts.append(pack_words((codes >> 4).reshape(-1, BLOCK), 1).view(torch.uint8).view(*codes.shape[:-1], 4))
    low, high = (codes & 15).split(BLOCK // 2, -1)
    return torch.cat([*parts, low | high << 4], -1)


def _symmetric(weight: QuantizedWeight, kind: GGMLQuantizationType) -> Tensor:
    """``Q4_0``, ``Q5_0`` and ``Q8_0``, in whose blocks narrower numbers and wider groups are the same."""
    out, inp = weight.codes.shape
    width = weight.scheme.group_width(inp)
    scales = _halves(weight.scales).repeat_interleave(width // BLOCK, 1)[:, : inp // BLOCK]
    numbers = weight.codes.to(torch.int16)
    if weight.zeros is None:
        numbers -= weight.scheme.zero
    else:  # all alike in files of other tools
        numbers -= weight.zeros.to(torch.int16).repeat_interleave(width, 1)[:, :inp]
    bits = _BITS[kind]
    largest = 1 << (bits - 1)
    if int(numbers.min()) < -largest or int(numbers.max()) >= largest:
        raise CheckpointError(f"a number minus its zero point does not fit {kind.name}")
    blocks = numbers.view(out, -1, BLOCK)
    codes = blocks.to(torch.int8).view(torch.uint8) if bits == 8 else _in_32((blocks + largest).to(torch.uint8), bits)
    return torch.cat([_bytes(scales[..., None]), codes], 2)


def _with_minimum(weight: QuantizedWeight) -> Tensor:
    """``Q4_1`` and ``Q5_1``."""
    scales, minima = _halves(weight.scales), _halves(-minima_of(weight))
    codes = _in_32(weight.codes.view(len(scales), -1, BLOCK), weight.scheme.bits)
    return torch.cat([_bytes(torch.stack([scales, minima], 2)), codes], 2)


def minima_of(weight: QuantizedWeight) -> Tensor:
    """float32 [out, groups]: what real zero points take away. They are quotients, rounded to 24 bits, of minima that
    have at most 17: those of a float16 times an integer of six."""
    assert weight.zeros is not None
    mantissa, exponent = torch.frexp(weight.zeros.double() * weight.scales)
    return torch.ldexp((mantissa * (1 << 18)).round(), exponent - 18).float()


def two_levels(numbers: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """A float16 [n] for each row of ``numbers`` float32 [n, m], and the integers int16 [n, m] from ``low`` to ``high``
    whose products with it they are. Raises ``CheckpointError`` where a row has none."""
    top = numbers.gather(1, numbers.abs().argmax(1, keepdim=True))
    d, whole = torch.zeros_like(top), torch.zeros_like(numbers)
    left = top.squeeze(1).nonzero().squeeze(1)
    for greatest in (*((low,) if low else ()), *range(high, 0, -1)):
        if not len(left):
            break
        unit = (top[left] / greatest).half().float()
        found = torch.where(unit == 0, 0.0, numbers[left] / unit).round_().clamp_(low, high)
        exact = (found * unit == numbers[left]).all(1)
        d[left[exact]], whole[left[exact]] = unit[exact], found[exact]
        left = left[~exact]
    if len(left):
        raise CheckpointError(f"its scales are not integers up to {high} times a float16 of {SUPERBLOCK} inputs")
    return d.squeeze(1).half(), whole.short()


def _levels(numbers: Tensor, group_size: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """``two_levels`` of [out, groups]: the bytes of a float16 for each superblock, uint8 [out, superblocks, 2], and its
    integers, int16 [out, superblocks, groups of one]."""
    rows = numbers.reshape(-1, SUPERBLOCK // group_size)
    d, whole = two_levels(rows, low, high)
    return _bytes(d[:, None]).view(len(numbers), -1, 2), whole.view(len(numbers), -1, rows.shape[1])


def _q3_k(weight: QuantizedWeight) -> Tensor:
    d, scales = _levels(weight.scales, 16, -32, 31)
    codes = weight.codes.view(*d.shape[:2], 8, 32)
    high = _or(codes >> 2 & 1, torch.arange(8), 2)
    low = _or((codes & 3).unflatten(2, (2, 4)), torch.arange(0, 8, 2), 3).flatten(2)
    stored = (scales + 32).to(torch.uint8)
    first, second = (stored & 15).split(8, 2)
    upper = _or((stored >> 4).unflatten(2, (4, 4)), torch.arange(0, 8, 2), 2)
    return torch.cat([high, low, first | second << 4, upper, d], 2)


def _q6_k(weight: QuantizedWeight) -> Tensor:
    d, scales = _levels(weight.scales, 16, -128, 127)
    codes = weight.codes.view(*d.shape[:2], 2, 4, 32)
    first, second = (codes & 15).flatten(3).split(64, 3)
    high = _or(codes >> 4, torch.arange(0, 8, 2), 3)
    return torch.cat([(first | second << 4).flatten(2), high.flatten(2), scales.to(torch.int8).view(torch.uint8), d], 2)


def _q4_k(weight: QuantizedWeight) -> Tensor:
    d, scales = _levels(weight.scales, 32, 0, 63)
    dmin, minima = _levels(minima_of(weight), 32, 0, 63)
    codes = weight.codes.view(*d.shape[:2], 4, 2, 32)
    (s, s_high), (m, m_high) = (each.to(torch.uint8).split(4, 2) for each in (scales, minima))
    six_bits = [s | s_high >> 4 << 6, m | m_high >> 4 << 6, s_high & 15 | (m_high & 15) << 4]
    fifth = [] if weight.scheme.bits == 4 else [_or(codes.flatten(2, 3) >> 4, torch.arange(8), 2)]
    nibbles = (codes & 15)[:, :, :, 0] | codes[:, :, :, 1] << 4
    return torch.cat([d, dmin, *six_bits, *fifth, nibbles.flatten(2)], 2)


def _or(fields: Tensor, places: Tensor, axis: int) -> Tensor:
    """uint8: the fields along ``axis`` in one byte, each at its place."""
    shape = [1] * fields.dim()
    shape[axis] = -1
    return (fields << places.to(torch.uint8).view(shape)).sum(axis, dtype=torch.uint8)


_SUPERBLOCKS: dict[str, Callable[[QuantizedWeight], Tensor]] = {
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip
