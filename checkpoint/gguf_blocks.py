"""Blocks of 32 numbers as llama.cpp stores them: symmetric integers with one scale in float16.

A block of ``Q4_0`` is its scale and 16 bytes, of which byte j holds the codes of numbers j (low half) and j + 16. A
block of ``Q5_0`` has 4 bytes more between the two: bit j, the lowest first, is the highest of number j. A block of
``Q8_0`` is its scale and 32 signed bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.formats.format import half, in_order
from qserve.checkpoint.grid import INTEGERS
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.checkpoint.words import pack_words

BLOCK = 32
_BITS = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q5_0: 5, GGMLQuantizationType.Q8_0: 8}


def block_type(scheme: WeightScheme, in_features: int) -> GGMLQuantizationType:
    """The smallest type that holds the numbers of ``scheme``. Raises ``CheckpointError`` where there is none."""
    if scheme.grid is not INTEGERS:
        raise CheckpointError(f"no block type holds {scheme} numbers")
    if not scheme.symmetric:
        raise CheckpointError("Q4_0, Q5_0 and Q8_0 have no zero points; quantize without --asym")
    if scheme.group_width(in_features) % BLOCK or in_features % BLOCK:
        raise CheckpointError(f"{scheme} weights of {in_features} inputs are no blocks of {BLOCK}; use --group-size 32")
    return next(kind for kind, bits in _BITS.items() if bits >= scheme.bits)


def block_bytes(kind: GGMLQuantizationType) -> int:
    return 2 + BLOCK * _BITS[kind] // 8


def pack_blocks(weight: QuantizedWeight) -> np.ndarray[Any, Any]:
    """uint8 [out, bytes of a row]: the very numbers of ``weight``. Raises ``CheckpointError`` where blocks would change
    them."""
    kind = block_type(weight.scheme, weight.in_features)
    if in_order(weight).g_idx is not None:
        raise CheckpointError("its groups are not consecutive inputs; quantize without --act-order of other tools")
    scales = half(weight.scales, "a scale")
    if not torch.equal(scales.float(), weight.scales):
        raise CheckpointError("its scales would be rounded to float16; quantize with --format gptq")
    out, inp = weight.codes.shape
    width = weight.scheme.group_width(inp)
    scales = scales.repeat_interleave(width // BLOCK, 1)[:, : inp // BLOCK].contiguous()
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
    parts = [scales.view(torch.uint8).view(out, -1, 2)]
    if bits == 8:
        parts.append(blocks.to(torch.int8).view(torch.uint8))
    else:
        codes = (blocks + largest).to(torch.uint8)
        if bits == 5:
            parts.append(pack_words((codes >> 4).view(-1, BLOCK), 1).view(torch.uint8).view(out, -1, 4))
        low, high = (codes & 15).split(BLOCK // 2, 2)
        parts.append(low | high << 4)
    return torch.cat(parts, 2).reshape(out, -1).numpy()
