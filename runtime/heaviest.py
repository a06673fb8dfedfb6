"""The steps of a decoder that take the most memory beside its buffers, run once after the load on a GPU.

They compile the kernels too, and leave every workspace as large as it will be. Knows decoders; does not know requests.
"""

from __future__ import annotations

import torch

from qserve.kernels.ops import BLOCK_SIZE, Step
from qserve.runtime.models.decoder import Decoder, DecoderLimits


def blocks(limits: DecoderLimits) -> int:
    """Of the cache that ``run`` needs: one prompt's, which all of its sequences share."""
    return -(-_prompt(limits) // BLOCK_SIZE)


def run(decoder: Decoder, num_blocks: int) -> None:
    """A step of prompts that is as large as may be with all logits, and one of decodes as long as ``num_blocks`` last.
    Leaves rubbish in the cache."""
    limits = decoder.limits
    prompt = _prompt(limits)
    _run(decoder, [(0, min(prompt, limits.max_tokens - begin)) for begin in range(0, limits.max_tokens, prompt)])
    sequences = min(limits.max_logits, limits.max_tokens)
    length = min(limits.max_positions, max(1, num_blocks * BLOCK_SIZE // sequences))
    _run(decoder, [(length - 1, 1)] * sequences)


def _prompt(limits: DecoderLimits) -> int:
    return min(limits.max_tokens, limits.max_positions)


def _run(decoder: Decoder, spans: list[tuple[int, int]]) -> None:
    """A step of sequences (first position, tokens) over the same blocks."""
    positions = torch.cat([torch.arange(start, start + count, dtype=torch.int32) for start, count in spans])
    lengths = torch.tensor([0, *(count for _, count in spans)], dtype=torch.int32)
    width = -(-int(positions.max() + 1) // BLOCK_SIZE)
    table = torch.arange(width, dtype=torch.int32) % decoder.kv.shape[2]
    step = Step(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=table[positions.long() // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        seq_start=lengths.cumsum(0, dtype=torch.int32),
        block_tables=table.expand(len(spans), width).contiguous(),
        logit_rows=torch.empty(0, dtype=torch.int32),
    )
    decoder.run(step)
    rows = torch.arange(min(len(positions), decoder.limits.max_logits), dtype=torch.int32)
    decoder.head(step, rows)
    decoder.log_softmax(step, rows)
    decoder.greedy.cpu()
