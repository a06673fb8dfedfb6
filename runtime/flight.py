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
from qserve.runtime.sampler import Sampled, draw_of, only_chooses, sample


@dataclass
class Flight:
    """``choices`` get a token each, in the order of the plan; ``masks``, by request, say which tokens some may have.

    ``output`` is there as soon as the step has begun. ``is_chosen``: the tokens in it are those that are chosen, and
    the step after may begin before they are known.
    """

    plan: StepPlan
    choices: Sequence[Choice]
    masks: dict[str, Future[Tensor]]
    output: StepOutput | None = None
    is_chosen: bool = False

    def choose(self) -> None:
        """Have the tokens chosen where the logits are, as soon as these are computed, if nobody needs more of them."""
        assert self.output is not None, "the step did not begin"
        if self.masks or not all(only_chooses(choice.sequence) for choice in self.choices):
            return
        draws = [
            (row, draw_of(sequence, choice.seed, len(sequence.output_token_ids) + sequence.num_in_flight - 1))
            for row, choice in enumerate(self.choices)
            if not (sequence := choice.sequence).params.greedy
        ]
        if draws:
            if self.output.draw is None:
                return
            self.output = self.output.draw(draws)
        self.is_chosen = True

    def land(self) -> list[Sampled]:
        """What was chosen for each of ``choices``, when it is computed."""
        assert self.output is not None, "the step did not begin"
        self.output.wait()
        if self.is_chosen:
            return [Sampled(token if token >= 0 else None) for token in self.output.greedy.tolist()]
        sequences, seeds = [choice.sequence for choice in self.choices], [choice.seed for choice in self.choices]
        masks = [self.masks.get(sequence.request_id) for sequence in sequences]
        allowed = [None if mask is None else mask.result() for mask in masks]
        with torch_threads(1):
            return sample(self.output.logits, self.output.greedy, sequences, seeds, allowed)
