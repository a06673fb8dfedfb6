"""Warm-up on a GPU, after the load: the steps of a decoder that take the most memory beside its buffers, and one of
every size that is prepared at its first use, with adapters and without.

They also compile the kernels, and leave every workspace at its final size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE
from qserve.kernels.row_sampling import RowSampling
from qserve.runtime.device_sampler import sample_rows
from qserve.runtime.models.decoder import Decoder, DecoderLimits


def blocks(limits: DecoderLimits) -> int:
    """Blocks of the cache that ``run`` needs: those of one prompt, which all of its sequences share."""
    return -(-_prompt(limits) // BLOCK_SIZE)


def run(decoder: Decoder, num_blocks: int, sizes: Sequence[int] = ()) -> None:
    """Run the largest possible step of prompts with all logits, smaller ones of ``sizes``, ``decode``, and a draw from
    every row of logits. Leaves rubbish in the cache."""
    limits = decoder.limits
    prompt = _prompt(limits)
    for tokens in _falling(limits.max_tokens, sizes):
        _run(decoder, [(0, min(prompt, tokens - begin)) for begin in range(0, tokens, prompt)])
    decode(decoder, num_blocks, sizes)
    sample_rows(decoder.logits, [(row, RowSampling(0.5, top_p=0.5)) for row in range(len(decoder.logits))]).cpu()


def decode(decoder: Decoder, num_blocks: int, sizes: Sequence[int] = ()) -> None:
    """Run a step of as many decodes as possible, as far as ``num_blocks`` allow, and smaller ones of ``sizes``. The
    widest comes first, so that no later one moves memory that a graph remembers. Leaves rubbish in the cache."""
    limits = decoder.limits
    sequences = min(limits.max_logits, limits.max_tokens)
    length = min(limits.max_positions, max(1, num_blocks * BLOCK_SIZE // sequences))
    for count in _falling(sequences, sizes):
        _run(decoder, [(length - 1, 1)] * count)


def _falling(most: int, sizes: Sequence[int]) -> list[int]:
    return [most, *sorted((size for size in sizes if size < most), reverse=True)]


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
        state_slots=torch.arange(len(spans), dtype=torch.int32) % max(1, decoder.limits.num_states),
    )
    decoder.run(*[step] * len(decoder.layout.groups))
    if decoder.lora is not None:  # an empty one: what it launches is the same
        adapted = replace(step, adapters=torch.zeros_like(positions))
        decoder.run(*[adapted] * len(decoder.layout.groups))
    rows = torch.arange(min(len(positions), decoder.limits.max_logits), dtype=torch.int32)
    decoder.head(step, rows)
    decoder.log_softmax(step, rows)
    decoder.greedy.cpu()
