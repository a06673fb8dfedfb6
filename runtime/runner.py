"""``ModelRunner``: runs a step plan and gives back the logits it asked for. Knows plans and tensors, not requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        ends = step.seq_start[1:] - 1
        for index, sequence in enumerate(plan.sequences):
            if sequence.wants_prompt_logprobs or sequence.wants_prompt_states:
                first = int(step.seq_start[index])
                rows = torch.arange(first, first + len(sequence.token_ids), dtype=torch.int32)
                start = sequence.start
                for part in rows.split(decoder.limits.max_logits):
                    wanted = self._states(step, part) if sequence.wants_prompt_states else self._logprobs(step, part)
                    prompt_sink(sequence.request_id, start, wanted)
                    start += len(part)
        sampling = [index for index, sequence in enumerate(plan.sequences) if sequence.num_sampled]
        rows = ends[sampling]
        if sampling:
            decoder.head(step, rows)
        keys, logits = tuple(plan.sequences[index].request_id for index in sampling), decoder.logits[: len(sampling)]
        self._rows = {key: row for row, key in enumerate(keys)}
        greedy = decoder.greedy[: len(sampling)]
        if greedy.device.type == "cpu":
            return StepOutput(keys, logits, greedy)
        fetched = torch.empty(greedy.shape, dtype=greedy.dtype, pin_memory=True)
        fetched.copy_(greedy, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return StepOutput(keys, logits, fetched, copied.synchronize)

    def _logprobs(self, step: Step, rows: Tensor) -> Tensor:
        self.decoder.head(step, rows)
        self.decoder.log_softmax(step, rows)
        return self.decoder.logits[: len(rows)].cpu()

    def _states(self, step: Step, rows: Tensor) -> Tensor:
        self.decoder.final_norm(step, rows)
        return self.decoder.states[: len(rows)].float().cpu()


def describe(plan: StepPlan, rows: Mapping[str, int] = MappingProxyType({})) -> Step:
    """A plan as the int32 arrays that the kernels read. ``rows``: where each request's newest token lies among the last
    greedy ones, for those of which the plan knows no more."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    widest = max(len(sequence.block_table) for sequence in plan.sequences)
    tables = []
    for sequence in plan.sequences:
        ids += sequence.token_ids
        if ids[-1] == PLACEHOLDER:
            ids[-1] = -1 - rows[sequence.request_id]
        table = sequence.block_table
        span = range(sequence.start, sequence.start + len(sequence.token_ids))
        positions += span
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
        starts.append(len(ids))
        tables.append([*table, *[0] * (widest - len(table))])
    int32 = torch.int32
    return Step(
        token_ids=torch.tensor(ids, dtype=int32),
        positions=torch.tensor(positions, dtype=int32),
        slots=torch.tensor(slots, dtype=int32),
        seq_start=torch.tensor(starts, dtype=int32),
        block_tables=torch.tensor(tables, dtype=int32),
        logit_rows=torch.empty(0, dtype=int32),
    )
