"""``Flight``: a step between its launch and its landing, when its tokens are known.

Knows a plan, what runs of it and who gets a token from it; does not know the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from qserve.kernels.threads import torch_threads
from qserve.runtime.choice import Choice
from qserve.runtime.plan import StepPlan
from qserve.runtime.runner import StepOutput
from qserve.runtime.sampler import Sampled, reads_logits, sample


@dataclass
class Flight:
    """``choices`` get a token each, in the order of the plan; ``masks``, by request, say which tokens some may have.

    ``output`` is there as soon as the step has begun.
    """

    plan: StepPlan
    choices: Sequence[Choice]
    masks: dict[str, Future[Tensor]]
    output: StepOutput | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether each of its tokens is the likeliest, whatever else is in the logits."""
        return not self.masks and not any(reads_logits(choice.sequence) for choice in self.choices)

    def land(self) -> list[Sampled]:
        """What was chosen for each of ``choices``, when it is computed."""
        assert self.output is not None, "the step did not begin"
        self.output.wait()
        sequences, seeds = [choice.sequence for choice in self.choices], [choice.seed for choice in self.choices]
        masks = [self.masks.get(sequence.request_id) for sequence in sequences]
        allowed = [None if mask is None else mask.result() for mask in masks]
        with torch_threads(1):
            return sample(self.output.logits, self.output.greedy, sequences, seeds, allowed)
