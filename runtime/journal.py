"""``Journal``: what the last steps held, how long first tokens took, and totals since the start.

It is always kept, whether or not somebody looks: a few integers per step, in rings of fixed length.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from qserve.runtime.step_plan import StepPlan

STEPS = 512
FIRST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. ``step`` counts plans from 0, ``time`` is in seconds on the engine's clock, the rest are tokens."""

    step: int
    time: float
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """``time`` at which a request got its first token, ``seconds`` after it arrived."""

    time: float
    seconds: float


class Journal:
    """``prompt_tokens`` counts the input tokens of prefills, including those computed again. ``output_tokens`` counts
    sampled tokens: one for each sequence of a step, plus the accepted tokens of its draft."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._steps: deque[StepRecord] = deque(maxlen=STEPS)
        self._first_tokens: deque[FirstToken] = deque(maxlen=FIRST_TOKENS)

    def step(self, plan: StepPlan, now: float) -> None:
        """Note a plan that is about to run."""
        prefill = sum(len(sequence.token_ids) for sequence in plan.sequences if sequence.is_prefill)
        self._steps.append(StepRecord(plan.step, now, prefill, plan.num_tokens - prefill))
        self.prompt_tokens += prefill
        self.output_tokens += sum(sequence.num_sampled > 0 for sequence in plan.sequences)

    def accepted(self, tokens: int) -> None:
        """Note tokens of drafts that were right."""
        self.output_tokens += tokens

    @property
    def newest(self) -> StepRecord | None:
        """The last step; None before the first."""
        return self._steps[-1] if self._steps else None

    def first_token(self, now: float, seconds: float) -> None:
        """Note that a request has its first token, ``seconds`` after it arrived."""
        self._first_tokens.append(FirstToken(now, seconds))

    def steps(self) -> tuple[StepRecord, ...]:
        """The last steps, oldest first."""
        return tuple(self._steps)

    def first_tokens(self) -> tuple[FirstToken, ...]:
        """The last first tokens, oldest first."""
        return tuple(self._first_tokens)
