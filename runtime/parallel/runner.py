"""``ParallelRunner``: runs plans on ranks with a part of every layer each, of which this process has the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from qserve.runtime.parallel.rank_processes import RankProcesses
from qserve.runtime.parallel.ranks_runner import RanksRunner
from qserve.runtime.parallel.step_channel import StepChannel
from qserve.runtime.runner import PromptSink, StepModel, StepOutput
from qserve.runtime.step_plan import StepPlan


class ParallelRunner(RanksRunner):
    """Plans run one after the other, and all ranks compute the same."""

    def __init__(self, model: StepModel, channel: StepChannel, processes: RankProcesses, slots: Tensor) -> None:
        super().__init__(model, channel, processes, slots)
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
