"""``ModelRunner``: runs a step plan and returns the logits that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Protocol

import torch
from torch import Tensor

from qserve.checkpoint.files import file_sha256
from qserve.kernels import native
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import BLOCK_SIZE
from qserve.kernels.row_sampling import RowSampling
from qserve.runtime.device_sampler import sample_rows, there
from qserve.runtime.models.decoder import DecoderLimits, HoldsBlocks, block_of, copy_blocks, copy_states
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
    stay on the model's device. ``hidden``: float32 [max_tokens, hidden_size] for each layer whose input is asked
    for (``Decoder.hidden``), there too; the rows of the step's tokens hold it.

    ``wait`` returns when ``greedy`` is there. On a device other than this machine's CPU ``greedy`` then stays valid for
    good. On such a device ``draw`` returns the same output with the token of each (row, draw) in place of the greedy
    one, which the placeholders of the next plan also stand for; a row with a NaN keeps its -1.
    """

    request_ids: tuple[str, ...]
    logits: Tensor
    greedy: Tensor
    wait: Callable[[], None] = lambda: None
    draw: Callable[[Sequence[tuple[int, RowSampling]]], StepOutput] | None = None
    hidden: tuple[Tensor, ...] = ()


class ModelRunner(Protocol):
    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        """Compute ``plan``, or begin to. If the executor is asynchronous, placeholders in it stand for the greedy
        tokens of the previous plan, or those drawn in their place."""
        ...


class StepModel(HoldsBlocks, Protocol):
    """What a runner needs of a model: ``Decoder`` says what each does."""

    limits: DecoderLimits
    executor: Executor
    logits: Tensor
    greedy: Tensor
    states: Tensor
    hidden: tuple[Tensor, ...]

    def run(self, *steps: Step) -> None: ...
    def head(self, step: Step, rows: Tensor) -> None: ...
    def final_norm(self, step: Step, rows: Tensor) -> None: ...
    def log_softmax(self, step: Step, rows: Tensor) -> None: ...
    @property
    def sequence_states(self) -> Sequence[Tensor]: ...


class DecoderRunner:
    """Runs plans on a model that computes steps."""

    def __init__(self, decoder: StepModel) -> None:
        self.decoder = decoder
        self._arrays = StepArrays()
        self._rows: dict[str, int] = {}  # of the last output, by request
        # The decoder's logits and greedy tokens of so many rows.
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def block_bytes(self) -> int:
        return block_of(self.decoder, 0).nbytes

    def add_slots(self, count: int) -> Tensor:
        """Number ``count`` slots in this machine's memory behind the blocks of the cache, so that plans can copy blocks
        there and back. Returns them, contiguous: [count, places, 2, …]."""
        places, pair, _, width = self.decoder.kv.shape
        self.decoder.slots = torch.empty(count, places, pair, width, dtype=self.decoder.kv.dtype)
        return self.decoder.slots

    def block(self, number: int) -> Tensor:
        """The keys and values in a block or slot: [places, 2, …]."""
        return block_of(self.decoder, number)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of keys and values, in order: ``(source, destination)``."""
        copy_blocks(self.decoder, copies)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the states of sequences, in order: ``(source, destination)``."""
        copy_states(self.decoder.sequence_states, copies)

    def cache_facts(self) -> dict[str, str]:
        """What the bits in the cache depend on, besides the checkpoint and the tokens."""
        executor, kv = self.decoder.executor, self.decoder.kv
        built = native.library_path() if executor.placement.device.type == "cpu" else None
        return {
            "kernels": f"{executor.name} {getattr(executor, 'isa', '')} {built and file_sha256(built)}",
            "placement": str(executor.placement),
            "cache": f"{kv.dtype}, {kv.shape[0]} places of {kv.shape[3]}, {BLOCK_SIZE} tokens",
            "versions": f"qserve {version('qserve-llm')}, torch {torch.__version__}",
        }

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        decoder = self.decoder
        self.copy_blocks(plan.copies)
        self.copy_states(plan.state_copies)
        steps = self._arrays.describe(plan, self._rows)
        decoder.run(*steps)
        self._read_out(plan, steps[0], prompt_sink)
        sampling = plan.rows
        self._rows = {key: row for row, key in enumerate(sampling)}
        output = self._fetched(sampling)
        if decoder.hidden:
            output = replace(output, hidden=decoder.hidden)
        return output

    def _read_out(self, plan: StepPlan, step: Step, prompt_sink: PromptSink) -> None:
        """Deliver what ``plan`` wants of the step just run, and compute its logits."""
        decoder, first = self.decoder, 0
        for sequence in plan.sequences:
            if sequence.wants_prompt_logprobs or sequence.wants_prompt_states:
                rows = torch.arange(first, first + len(sequence.token_ids), dtype=torch.int32)
                start = sequence.start
                for part in rows.split(decoder.limits.max_logits):
                    wanted = self._states(step, part) if sequence.wants_prompt_states else self._logprobs(step, part)
                    prompt_sink(sequence.request_id, start, wanted)
                    start += len(part)
            first += len(sequence.token_ids)
        if step.logits:
            decoder.head(step, step.logit_rows)

    def _first_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """The first rows of the logits and of the greedy tokens."""
        if count not in self._outputs:
            self._outputs[count] = self.decoder.logits[:count], self.decoder.greedy[:count]
        return self._outputs[count]

    def _sampled(self, sampling: tuple[str, ...], draws: Sequence[tuple[int, RowSampling]]) -> StepOutput:
        logits, greedy = self._first_rows(len(sampling))
        rows = there([row for row, _ in draws], torch.int64, greedy.device)
        greedy[rows] = torch.where(greedy[rows] < 0, -1, sample_rows(logits, draws).int())
        return self._fetched(sampling)

    def _fetched(self, sampling: tuple[str, ...]) -> StepOutput:
        logits, greedy = self._first_rows(len(sampling))
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
