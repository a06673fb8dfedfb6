"""``ModelRunner``: runs a step plan and gives back the logits it asked for. Knows plans and tensors, not requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from qserve.kernels.ops import BLOCK_SIZE, Step
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.plan import StepPlan
from qserve.runtime.request import PLACEHOLDER

PromptSink = Callable[[str, int, Tensor], None]
"""Takes a request's id, a position, and float32 [n, vocab]: the log-probabilities of the tokens that follow that
position and the next n - 1; or float32 [n, hidden_size]: the last hidden states there, where those are wanted.
The tensor is valid during the call only."""


@dataclass(frozen=True)
class StepOutput:
    """``logits`` float32 [n, vocab] and ``greedy`` int32 [n] (-1 where a row holds a NaN), one row per sequence
    that samples, in the order of the plan. Valid until the next step. ``logits`` stay on the model's device.

    ``wait`` returns when ``greedy`` is there, which is then valid for good where the device is not this machine's
    processor.
    """

    request_ids: tuple[str, ...]
    logits: Tensor
    greedy: Tensor
    wait: Callable[[], None] = lambda: None


class ModelRunner(Protocol):
    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        """Compute ``plan``, or begin to. Where the executor is asynchronous, placeholders in it stand for the greedy
        tokens of the plan before."""
        ...


class DecoderRunner:
    """Runs plans on a native decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._rows: dict[str, int] = {}  # of the last output, by request

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        decoder = self.decoder
        decoder.copy_blocks(plan.copies)
        step = describe(plan, self._rows)
        decoder.run(step)
        first = 0
        for sequence in plan.sequences:
            if sequence.wants_prompt_logprobs or sequence.wants_prompt_states:
                rows = torch.arange(first, first + len(sequence.token_ids), dtype=torch.int32)
                start = sequence.start
                for part in rows.split(decoder.limits.max_logits):
                    wanted = self._states(step, part) if sequence.wants_prompt_states else self._logprobs(step, part)
                    prompt_sink(sequence.request_id, start, wanted)
                    start += len(part)
            first += len(sequence.token_ids)
        sampling = tuple(sequence.request_id for sequence in plan.sequences if sequence.num_sampled)
        if sampling:
            decoder.head(step, step.logit_rows)
        self._rows = {key: row for row, key in enumerate(sampling)}
        logits, greedy = decoder.logits[: len(sampling)], decoder.greedy[: len(sampling)]
        if greedy.device.type == "cpu":
            return StepOutput(sampling, logits, greedy)
        fetched = torch.empty(greedy.shape, dtype=greedy.dtype, pin_memory=True)
        fetched.copy_(greedy, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return StepOutput(sampling, logits, fetched, copied.synchronize)

    def _logprobs(self, step: Step, rows: Tensor) -> Tensor:
        self.decoder.head(step, rows)
        self.decoder.log_softmax(step, rows)
        return self.decoder.logits[: len(rows)].cpu()

    def _states(self, step: Step, rows: Tensor) -> Tensor:
        self.decoder.final_norm(step, rows)
        return self.decoder.states[: len(rows)].float().cpu()


def describe(plan: StepPlan, newest: Mapping[str, int] = MappingProxyType({})) -> Step:
    """A plan as the int32 arrays that the kernels read; the logits wanted are those that are sampled from. ``newest``:
    where each request's last token lies among the last greedy ones, for those of which the plan knows no more."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    rows: list[int] = []
    tables: list[int] = []
    widest = max(len(sequence.block_table) for sequence in plan.sequences)
    for sequence in plan.sequences:
        ids += sequence.token_ids
        if ids[-1] == PLACEHOLDER:
            ids[-1] = -1 - newest[sequence.request_id]
        table = sequence.block_table
        span = range(sequence.start, sequence.start + len(sequence.token_ids))
        positions += span
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
        starts.append(len(ids))
        if sequence.num_sampled:
            rows.append(len(ids) - 1)
        tables += table
        tables += [0] * (widest - len(table))
    parts = (ids, positions, slots, starts, rows, tables)
    # One tensor for all: after a step the caches hold weights, and each call into torch is slow.
    arrays = torch.tensor(list(chain(*parts)), dtype=torch.int32).split([len(part) for part in parts])
    token_ids, position, slot, seq_start, logit_rows, block_tables = arrays
    return Step(token_ids, position, slot, seq_start, block_tables.view(-1, widest), logit_rows)
