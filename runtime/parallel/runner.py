"""``ParallelRunner``: runs plans on several ranks, of which this process has the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from qserve.kernels.executor import Step
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.parallel.rank_processes import RankProcesses
from qserve.runtime.parallel.ranks_runner import RanksRunner
from qserve.runtime.parallel.step_channel import StepChannel
from qserve.runtime.runner import PromptSink, StepOutput
from qserve.runtime.step_plan import StepPlan


class _FirstRank:
    """A decoder that lets the others run what it runs."""

    def __init__(self, decoder: Decoder, channel: StepChannel) -> None:
        self._decoder, self._channel = decoder, channel
        self.limits, self.executor = decoder.limits, decoder.executor
        self.logits, self.greedy, self.states = decoder.logits, decoder.greedy, decoder.states
        self.hidden = decoder.hidden
        self.sequence_states, self.slots = decoder.sequence_states, decoder.slots
        self.final_norm, self.log_softmax = decoder.final_norm, decoder.log_softmax  # of what this rank has as a whole

    @property
    def kv(self) -> Tensor:
        return self._decoder.kv

    def run(self, *steps: Step) -> None:
        self._channel.run(steps, self.greedy)
        self._decoder.run(*steps)

    def head(self, step: Step, rows: Tensor) -> None:
        self._channel.head(None if rows is step.logit_rows else rows)
        self._decoder.head(step, rows)


class ParallelRunner(RanksRunner):
    """Each rank has a part of every layer."""

    def __init__(self, decoder: Decoder, channel: StepChannel, processes: RankProcesses, slots: Tensor) -> None:
        super().__init__(_FirstRank(decoder, channel), channel, processes, slots)
        self._channel = channel

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        with self.processes.explained():
            return super().run(plan, prompt_sink)

    def _fetched(self, sampling: tuple[str, ...]) -> StepOutput:
        output = super()._fetched(sampling)
        return replace(output, wait=partial(self._wait, output.wait))

    def _wait(self, wait: Callable[[], None]) -> None:
        """A GPU goes on where another one has ended, with rubbish."""
        wait()
        with self.processes.explained():
            self._channel.require_all()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._channel.copy(copies)
        super().copy_blocks(copies)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        self._channel.copy_states(copies)
        super().copy_states(copies)
