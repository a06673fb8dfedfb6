"""``StepInFlight``: a step that has begun and whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qserve.kernels.threads import torch_threads
from qserve.runtime.block_tiers import Transfer
from qserve.runtime.choice import Choice
from qserve.runtime.runner import StepOutput
from qserve.runtime.sampler import Sampled, chooses_as_it_is, row_sampling, sample, with_logprobs
from qserve.runtime.step_plan import StepPlan


@dataclass
class StepInFlight:
    """``choices`` get a run of tokens each, in the order of the plan. ``masks``, by request and row, say which
    tokens some of them may have.

    ``output`` is there as soon as the step has begun. ``is_chosen``: its tokens are the chosen ones, and the next step
    may begin before they are known. ``told``: then, by row, the logits whose log-probabilities are wanted, here and no
    longer on the device, as soon as the tokens are known. ``threads`` draw on the CPU, None for all cores. ``began``:
    seconds on the engine's clock. ``transfers`` of KV blocks begin when it has landed.
    """

    plan: StepPlan
    choices: Sequence[Choice]
    masks: dict[str, Future[list[Tensor]]]
    output: StepOutput | None = None
    is_chosen: bool = False
    told: dict[int, Tensor] = field(default_factory=dict)
    threads: int | None = None
    began: float = 0.0
    transfers: tuple[Transfer, ...] = ()

    def choose(self) -> None:
        """If nobody's logits are changed first, have the tokens chosen on their device as soon as they are computed."""
        assert self.output is not None, "the step did not begin"
        if self.masks or not all(chooses_as_it_is(choice.sequence) for choice in self.choices):
            return
        draws, told = [], []
        for row, (choice, draft) in enumerate(self._rows()):
            sequence = choice.sequence
            if not sequence.params.greedy:
                sampled = len(sequence.output_token_ids) + sequence.num_in_flight - sequence.num_drafted - 1
                draws.append((row, row_sampling(sequence, choice.seed, sampled + len(draft))))
            if sequence.params.logprobs is not None:
                told.append(row)
        if draws or told:
            if self.output.draw is None:
                return
            self._fetch(told)
            self.output = self.output.draw(draws)  # also without draws: its ``wait`` is for what was fetched, too
        self.is_chosen = True

    def _fetch(self, rows: Sequence[int]) -> None:
        """Have these rows of the logits copied from the device before the next step overwrites them."""
        assert self.output is not None, "the step did not begin"
        logits = self.output.logits
        fetched = torch.empty(len(rows), logits.shape[1], pin_memory=logits.is_cuda)
        for place, row in zip(fetched, rows):
            place.copy_(logits[row], non_blocking=True)
        self.told = dict(zip(rows, fetched))

    def land(self) -> list[list[Sampled]]:
        """The tokens chosen for each of ``choices``, once computed: the tokens of its draft that were right, and one
        more. An entry without a token, where there was none to choose, is the last of its run. Where a mask failed, its
        error is the ``defect``."""
        assert self.output is not None, "the step did not begin"
        self.output.wait()
        if self.is_chosen:
            found = [Sampled(token if token >= 0 else None) for token in self.output.greedy.tolist()]
            if self.told:
                rows = self._rows()
                for row, logits in self.told.items():
                    if (token := found[row].token_id) is not None:
                        found[row] = with_logprobs(logits, token, rows[row][0].sequence)
        else:
            rows = self._rows()
            sequences, seeds = [choice.sequence for choice, _ in rows], [choice.seed for choice, _ in rows]
            masks = [self.masks.get(sequence.request_id) for sequence in sequences]
            defects = [None if mask is None else mask.exception() for mask in masks]
            allowed = [
                None if mask is None or defect else mask.result()[len(draft)]
                for mask, defect, (_, draft) in zip(masks, defects, rows)
            ]
            with torch_threads(1):
                found = sample(
                    self.output.logits, self.output.greedy, sequences, seeds, allowed, [draft for _, draft in rows],
                    self.threads,
                )
            found = [Sampled(None, defect=defect) if defect else each for each, defect in zip(found, defects)]
        if len(found) == len(self.choices):  # nobody has a draft
            return [[each] for each in found]
        rest = iter(found)
        return [
            _accepted(sequence.draft, [next(rest) for _ in range(sequence.num_sampled)])
            for sequence in self.plan.sequences
            if sequence.num_sampled
        ]

    def _rows(self) -> list[tuple[Choice, tuple[int, ...]]]:
        """For each row of logits its choice, and the tokens of the draft before the one that the row chooses."""
        sampling = [sequence for sequence in self.plan.sequences if sequence.num_sampled]
        return [
            (choice, sequence.draft[:count])
            for choice, sequence in zip(self.choices, sampling, strict=True)
            for count in range(sequence.num_sampled)
        ]


def _accepted(draft: Sequence[int], found: list[Sampled]) -> list[Sampled]:
    """The beginning of ``found`` that follows tokens that really came. A row without a token, other than the first,
    ends the run before it: the next step finds the same."""
    count = 1
    for guess, sampled in zip(draft, found):
        if sampled.token_id != guess or found[count].token_id is None:
            break
        count += 1
    return found[:count]
