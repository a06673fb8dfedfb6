"""``StepPlan``: one step of the model as plain data, to print, store and replay; and its results.

Knows token ids and block numbers; does not know who decided them (``Scheduler``) or who runs them (``ModelRunner``).
What a step makes for each request is a named tuple: as immutable as a frozen dataclass, and made in a third of the
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class ScheduledSequence(NamedTuple):
    """One request's share of a step.

    Attributes:
        token_ids: input tokens of this step. -1 stands for the newest token of this request, sampled by an
            earlier plan that was not committed when this one was made.
        start: position of the first of them.
        block_tables: for each group of layers (``CacheLayout``) a table: position p lies in its block
            ``p // block_size``. Long enough for every token here; entries of blocks that no token here sees are
            arbitrary.
        num_sampled: rows of logits that choose a token, those of the last tokens here. 0 for a part of a prompt without
            its end. More than 1 for a draft: each token after the first of them stands if the row before it chooses
            that token.
        is_prefill: False for a decode (the one token sampled last, and a draft of what follows it).
        wants_prompt_logprobs: deliver the log-probability rows of the prompt positions in this chunk. Every
            prompt position is asked for exactly once, even if the request is preempted.
        wants_prompt_states: the same for the model's last hidden states.
        adapter: the slot of the request's LoRA adapter, -1 for none.
        state: the slot of the states that layers keep of the request; -1 where none keeps any.
        saves: ``(tokens, slot)``: the states behind the first so many tokens of the request are copied to the slot.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    num_sampled: int
    is_prefill: bool
    wants_prompt_logprobs: bool = False
    wants_prompt_states: bool = False
    adapter: int = -1
    state: int = -1
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def draft(self) -> tuple[int, ...]:
        """The tokens of a draft, which may be taken back."""
        return self.token_ids[len(self.token_ids) - self.num_sampled + 1 :] if self.num_sampled else ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the model, as plain data.

    Attributes:
        step: counts the plans of a scheduler from 0.
        sequences: what runs, decodes first; no request twice. Among decodes, and among the others, those of an adapter
            follow each other.
        preempted: requests that lost their blocks since the last plan.
        copies: ``(source, destination)`` blocks to copy, in order, before anything else. Numbers behind those of the
            cache are slots of memory (``BlockTiers``): a copy into one saves a block, a copy from one brings it back.
        state_copies: ``(source, destination)`` slots of states to copy likewise.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...]
    copies: tuple[tuple[int, int], ...]
    state_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def is_decode(self) -> bool:
        """Whether it has no part of a prompt."""
        return not any(s.is_prefill for s in self.sequences)

    @property
    def rows(self) -> tuple[str, ...]:
        """The request of each row of logits that the step computes, in order."""
        return tuple([s.request_id for s in self.sequences for _ in range(s.num_sampled)])

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data."""
        return {
            "step": self.step,
            "sequences": [sequence._asdict() for sequence in self.sequences],
            "preempted": self.preempted,
            "copies": self.copies,
            "state_copies": self.state_copies,
            "num_tokens": self.num_tokens,
        }


class RequestUpdate(NamedTuple):
    """What a committed step did to one request: its new tokens and, if it ended, how."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
