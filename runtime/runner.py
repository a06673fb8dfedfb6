"""``ModelRunner``: runs a step plan and returns the logits that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from qserve.kernels.draw import RowSampling
from qserve.kernels.ops import Executor, Step
from qserve.runtime.device_sampler import sample_rows, there
from qserve.runtime.models.decoder import DecoderLimits
from qserve.runtime.step_arrays import StepArrays
from qserve.runtime.step_plan import StepPlan

PromptSink = Callable[[str, int, Tensor], None]
"""Takes a request's id, a position, and float32 [n, vocab]: the log-probabilities of the tokens that follow that
position and the next n - 1; or float32 [n, hidden_size]: the last hidden states there, where those are wanted.
The tensor is valid during the call only."""


@dataclass(frozen=True)
class StepOutput:
    """``logits`` float32 [n, vocab] and ``greedy`` int32 [n] (-1 where a row holds a NaN): as many rows per sequence as
    it samples, in the order of the plan. ``request_ids`` says whose each row is. Valid until the next step. ``logits``
    stay on the model's device.

    ``wait`` returns when ``greedy`` is there. On a device other than this machine's CPU ``greedy`` then stays valid for
    good. On such a device ``draw`` returns the same output with the token of each (row, draw) in place of the greedy
    one, which the placeholders of the next plan also stand for; a row with a NaN keeps its -1.
    """

    request_ids: tuple[str, ...]
    logits: Tensor
    greedy: Tensor
    wait: Callable[[], None] = lambda: None
    draw: Callable[[Sequence[tuple[int, RowSampling]]], StepOutput] | None = None


class ModelRunner(Protocol):
    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        """Compute ``plan``, or begin to. If the executor is asynchronous, placeholders in it stand for the greedy
        tokens of the previous plan, or those drawn in their place."""
        ...


class StepModel(Protocol):
    """What a runner needs of a model: ``Decoder`` says what each does."""

    limits: DecoderLimits
    executor: Executor
    logits: Tensor
    greedy: Tensor
    states: Tensor

    def run(self, *steps: Step) -> None: ...
    def head(self, step: Step, rows: Tensor) -> None: ...
    def final_norm(self, step: Step, rows: Tensor) -> None: ...
    def log_softmax(self, step: Step, rows: Tensor) -> None: ...
    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None: ...


class DecoderRunner:
    """Runs plans on a model that computes steps."""

    def __init__(self, decoder: StepModel) -> None:
        self.decoder = decoder
        self._arrays = StepArrays()
        self._rows: dict[str, int] = {}  # of the last output, by request
        # The decoder's logits and greedy tokens of so many rows.
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        decoder = self.decoder
        decoder.copy_blocks(plan.copies)
        steps = self._arrays.describe(plan, self._rows)
        decoder.run(*steps)
        step = steps[0]
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
        sampling = plan.rows
        if sampling:
            decoder.head(step, step.logit_rows)
        self._rows = {key: row for row, key in enumerate(sampling)}
        if (count := len(sampling)) not in self._outputs:
            self._outputs[count] = decoder.logits[:count], decoder.greedy[:count]
        return self._fetched(sampling)

    def _sampled(self, sampling: tuple[str, ...], draws: Sequence[tuple[int, RowSampling]]) -> StepOutput:
        logits, greedy = self._outputs[len(sampling)]
        rows = there([row for row, _ in draws], torch.int64, greedy.device)
        greedy[rows] = torch.where(greedy[rows] < 0, -1, sample_rows(logits, draws).int())
        return self._fetched(sampling)

    def _fetched(self, sampling: tuple[str, ...]) -> StepOutput:
        logits, greedy = self._outputs[len(sampling)]
        if not greedy.is_cuda:
            return StepOutput(sampling, logits, greedy)
        fetched = torch.empty(greedy.shape, dtype=greedy.dtype, pin_memory=True)
        fetched.copy_(greedy, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return StepOutput(sampling, logits, fetched, copied.synchronize, partial(self._sampled, sampling))

    def _logprobs(self, step: Step, rows: Tensor) -> Tensor:
        self.decoder.head(step, rows)
        self.decoder.log_softmax(step, rows)
        return self.decoder.logits[: len(rows)].cpu()

    def _states(self, step: Step, rows: Tensor) -> Tensor:
        self.decoder.final_norm(step, rows)
        return self.decoder.states[: len(rows)].float().cpu()
