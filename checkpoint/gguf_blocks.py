"""Blocks of 32 numbers as llama.cpp stores them: symmetric integers with one scale in float16.

A block of ``Q4_0`` is its scale and 16 bytes, of which byte j holds the codes of numbers j (low half) and j + 16. A
block of ``Q8_0`` is its scale and 32 signed bytes.
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

BLOCK = 32


def block_type(scheme: WeightScheme, in_features: int) -> GGMLQuantizationType:
    """The smallest type that holds the numbers of ``scheme``. Raises ``CheckpointError`` where there is none."""
    if scheme.grid is not INTEGERS:
        raise CheckpointError(f"no block type holds {scheme} numbers")
    if not scheme.symmetric:
        raise CheckpointError("Q4_0 and Q8_0 have no zero points; quantize without --asym")
    if scheme.group_width(in_features) % BLOCK or in_features % BLOCK:
        raise CheckpointError(f"{scheme} weights of {in_features} inputs are no blocks of {BLOCK}; use --group-size 32")
    return GGMLQuantizationType.Q4_0 if scheme.bits <= 4 else GGMLQuantizationType.Q8_0


def block_bytes(kind: GGMLQuantizationType) -> int:
    return 2 + BLOCK // 2 if kind is GGMLQuantizationType.Q4_0 else 2 + BLOCK


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
    largest = 8 if kind is GGMLQuantizationType.Q4_0 else 128
    if int(numbers.min()) < -largest or int(numbers.max()) >= largest:
        raise CheckpointError(f"a number minus its zero point does not fit {kind.name}")
    blocks = numbers.view(out, -1, BLOCK)
    if kind is GGMLQuantizationType.Q4_0:
        low, high = (blocks + 8).to(torch.uint8).split(BLOCK // 2, 2)
        stored = low | high << 4
    else:
        stored = blocks.to(torch.int8).view(torch.uint8)
    packed = torch.cat([scales.view(torch.uint8).view(out, -1, 2), stored], 2)
    return packed.reshape(out, -1).numpy()
