"""``PlanRecorder``: a runner that remembers the newest plan it ran, for timing an engine's steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qserve.runtime.engine import Engine
from qserve.runtime.runner import ModelRunner, PromptSink, StepOutput
from qserve.runtime.step_plan import StepPlan


class PlanRecorder:
    """Runs plans on another runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._newest: StepPlan | None = None

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        self._newest = plan
        return self._runner.run(plan, prompt_sink)

    def take(self) -> StepPlan | None:
        """The plan that ran since the last call, if one did."""
        plan, self._newest = self._newest, None
        return plan


@contextmanager
def recording(engine: Engine) -> Iterator[PlanRecorder]:
    """In this context the engine's plans are recorded, and steps run one after another."""
    runner, overlaps = engine.runner, engine.overlaps
    recorder = PlanRecorder(runner)
    engine.runner, engine.overlaps = recorder, False
    try:
        yield recorder
    finally:
        engine.runner, engine.overlaps = runner, overlaps
