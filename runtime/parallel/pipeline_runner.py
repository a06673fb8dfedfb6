"""``PipelineRunner``: runs plans on the stages of a pipeline, of which this process has the last."""

from __future__ import annotations

import math
import time
from functools import partial

from torch import Tensor

from qserve.kernels.threads import torch_threads
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.parallel.first_rank import FirstRank
from qserve.runtime.parallel.rank_processes import RankProcesses
from qserve.runtime.parallel.ranks_runner import RanksRunner
from qserve.runtime.parallel.stage_channel import StageChannel
from qserve.runtime.runner import PromptSink, StepOutput
from qserve.runtime.step_plan import StepPlan

_MEMORY = 10.0  # seconds of steps in flight, after which what a stage did counts a third


class PipelineRunner(RanksRunner):
    """``run`` hands a plan to the first stage. The last one computes it when its output is waited for, and meanwhile
    the others go on with other plans: up to ``num_stages``, none of which has tokens that another one samples. Outputs
    are waited for in order.
    """

    def __init__(
        self, model: Decoder | FirstRank, channel: StageChannel, processes: RankProcesses, slots: Tensor
    ) -> None:
        super().__init__(model, channel, processes, slots)
        self.num_stages = len(channel.busy)
        self._model, self._channel = model, channel
        self._since = 0.0  # in flight until then
        self._seconds = 0.0  # with a step in flight; they and ``_worked`` fade
        self._worked = channel.busy * 0
        self._counted = channel.busy * 0

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        if not self._channel.num_in_flight:
            self._since = time.perf_counter()
        with self.processes.explained():
            steps = self._arrays.describe(plan, {})
            number = self._channel.publish(steps, plan.copies, plan.state_copies, self._model)
        logits, greedy = self._first_rows(len(plan.rows))
        return StepOutput(plan.rows, logits, greedy, partial(self._finish, number, plan, prompt_sink))

    def block(self, number: int) -> Tensor:
        while self._channel.num_in_flight:  # nobody waits for them any more
            self._channel.run(self._model)
        return super().block(number)

    def idle_ratios(self) -> tuple[float, ...]:
        """For each stage the share of the time, 0 to 1, in which it had nothing to compute although a step was in
        flight, of late."""
        if not self._seconds:
            return (0.0,) * self.num_stages
        return tuple((1 - self._worked / self._seconds).clip(0, 1).tolist())

    def _finish(self, number: int, plan: StepPlan, prompt_sink: PromptSink) -> None:
        with self.processes.explained(), torch_threads(1):
            ran, step = self._channel.run(self._model)
            while ran < number:  # that one failed, and nobody waits for it
                ran, step = self._channel.run(self._model)
            began = time.perf_counter()
            self._read_out(plan, step, prompt_sink)
            self._channel.busy[-1] += time.perf_counter() - began
        self._count()

    def _count(self) -> None:
        """Take in what the stages did since the last step ended."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        busy = self._channel.busy.copy()
        fading = math.exp(-seconds / _MEMORY)
        self._seconds = self._seconds * fading + seconds
        self._worked = self._worked * fading + busy - self._counted
        self._counted = busy
