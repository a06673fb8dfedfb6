"""``Request``: the state of one sequence, from arrival to its last token.

Knows its tokens, how far its KV is computed and when its own rules end it. Does not know blocks
(``BlockManager`` owns the block tables), queues (``Scheduler``) or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from qserve.runtime.sampling import INT31, RequestError, SamplingParams

PLACEHOLDER = -1
MAX_PRIORITY = 1000


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Once it is added, the scheduler alone changes its fields.

    Attributes:
        request_id: unique among the live requests of a scheduler.
        prompt_token_ids: at least one token, none negative.
        eos_token_ids: tokens that end the output unless ``params.ignore_eos``.
        bad_words: sequences of tokens of which none may come.
        adapter: the slot of its LoRA adapter, -1 for none.
        max_total_tokens: prompt and output tokens at most; ``Scheduler.add`` lowers it to the context.
        max_output_tokens: outputs at most; a prompt that fills the context still yields one, which is never fed back,
            unless it is for an embedding.
        priority: lower runs first, -1000..1000.
        cache_salt: only requests of the same salt share cached prefixes.
        tenant: whose request it is; tenants are served equally, by weight.
        weight: the share of its tenant, above 0; the same in all of a tenant's requests.
        arrival: number that orders requests which arrived at the same time.
        arrival_time: seconds on the clock that ``Scheduler.schedule`` is given.
        parent: a request with the same prompt and salt (an earlier choice of ``n``). This one waits until that prompt
            is computed and shares its blocks. None once it is admitted.
        beams: the live beams of its search, in one list that they share and the scheduler keeps; empty where it is no
            beam. Beams run, wait and are preempted together.
        is_scored: something is wanted of each of its prompt positions, so that all of them are computed. The
            log-probabilities of a prompt are those of ``parent`` for its other choices too.
        num_queued: prompt tokens that it adds to the queue: none where it shares those of ``parent``.
        num_computed: leading tokens whose KV exists or is written by plans in flight.
        num_committed: leading tokens whose KV was written by committed plans.
        num_in_flight: tokens being sampled by plans in flight; they follow the known tokens as placeholders.
        num_drafted: those of them that depend on the draft in flight. Nothing is planned until it is known how many of
            them are right.
        num_plans: uncommitted plans that hold this request.
        num_cached: prompt tokens that were not computed at first admission (prefix cache, or ``parent``).
        num_charged: leading prompt tokens that were counted as service to the tenant, or came from the cache.
        num_scored: leading prompt tokens whose log-probabilities are delivered by the plans made so far.
        digests: chained digests of the leading full blocks, a memo of ``digests.chain_digests``.
        seen: its tokens as the penalties count them, with and without those of the prompt, a memo of the sampler.
        scheduled_time: ``now`` of the first plan that held this request.
        was_fetched: while it waits: its blocks on disk were asked for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int = INT31
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    arrival: int = 0
    arrival_time: float = 0.0
    parent: Request | None = field(default=None, repr=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    adapter: int = -1

    max_output_tokens: int = field(default=0, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    status: Status = field(default=Status.WAITING, init=False)
    finish_reason: str | None = field(default=None, init=False)
    stop_reason: str | int | None = field(default=None, init=False)
    is_scored: bool = field(default=False, init=False)
    num_queued: int = field(default=0, init=False)
    num_computed: int = field(default=0, init=False)
    num_committed: int = field(default=0, init=False)
    num_in_flight: int = field(default=0, init=False)
    num_drafted: int = field(default=0, init=False)
    num_plans: int = field(default=0, init=False)
    num_cached: int = field(default=0, init=False)
    num_charged: int = field(default=0, init=False)
    num_scored: int = field(default=0, init=False)
    digests: list[bytes] = field(default_factory=list, init=False, repr=False)
    seen: dict[bool, Any] = field(default_factory=dict, init=False, repr=False)
    beams: list[Request] = field(default_factory=list, init=False, repr=False)
    scheduled_time: float | None = field(default=None, init=False)
    was_fetched: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        if not self.prompt_token_ids:
            raise RequestError("the prompt holds no token", "prompt")
        if min(self.prompt_token_ids) < 0:
            raise RequestError(f"token id {min(self.prompt_token_ids)} of the prompt is negative", "prompt")
        self.is_scored = self.is_pooled or (self.params.prompt_logprobs is not None and self.parent is None)
        self.num_queued = 0 if self.parent else len(self.prompt_token_ids)
        self.limit(self.max_total_tokens)
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise RequestError(
                f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {self.priority}",
                "priority",
            )
        if not 0 < self.weight < float("inf"):
            raise RequestError(f"weight must be a positive number, not {self.weight}")
        parent = self.parent
        if parent is not None and (parent.prompt_token_ids, parent.cache_salt) != (
            self.prompt_token_ids,
            self.cache_salt,
        ):
            raise RequestError(f"prompt and salt differ from those of parent {parent.request_id}", "parent")

    def limit(self, max_total_tokens: int) -> None:
        """Set the most tokens that it may have, the prompt's included."""
        self.max_total_tokens = max_total_tokens
        room = max(1, max_total_tokens - len(self.prompt_token_ids))
        wanted = room if self.params.max_tokens is None else min(room, self.params.max_tokens)
        self.max_output_tokens = 0 if self.is_pooled else wanted

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt, outputs, and placeholders of outputs in flight."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def max_positions(self) -> int:
        """Positions of KV it can ever need: the last output is never fed back."""
        return self.num_prompt + max(self.max_output_tokens - 1, 0)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def endings(self) -> frozenset[int]:
        """Tokens that end it."""
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else self.eos_token_ids)

    @property
    def members(self) -> tuple[Request, ...]:
        """The requests that run, wait and are preempted with it: itself alone, or all beams of its search."""
        return tuple(self.beams) or (self,)

    @property
    def is_pooled(self) -> bool:
        """Whether only the hidden states of its prompt are wanted: no token is sampled."""
        return self.params.pooling is not None

    @property
    def num_plannable(self) -> int:
        """Tokens that can be computed without other beams: the last token of several beams waits for the others."""
        return self.num_tokens - (len(self.beams) > 1)

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest sampled token is not yet computed."""
        prompt = len(self.prompt_token_ids)
        return prompt <= self.num_computed == prompt + len(self.output_token_ids) + self.num_in_flight - 1

    @property
    def is_fully_sampled(self) -> bool:
        """Whether it reaches its length limit with the tokens in flight, so that nothing is left to plan."""
        return len(self.output_token_ids) + self.num_in_flight >= self.max_output_tokens

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions ``start .. stop - 1``; those still in flight read ``PLACEHOLDER``."""
        prompt = self.num_prompt
        known = (
            *self.prompt_token_ids[start:stop],
            *self.output_token_ids[max(start - prompt, 0) : max(stop - prompt, 0)],
        )
        return known + (PLACEHOLDER,) * (stop - start - len(known))

    def append(self, token_id: int) -> str | None:
        """Take one sampled token. Returns ``"stop"`` or ``"length"`` if it is the last, else None.

        ``stop_reason`` becomes the stop token if one ended it, and stays None after an end-of-sequence token. Neither
        ends the request among its first ``min_tokens`` outputs, where the sampler should mask them.
        """
        outputs, params = self.output_token_ids, self.params
        outputs.append(token_id)
        # The search decides where a beam ends.
        if len(outputs) > params.min_tokens and not params.use_beam_search:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return "stop"
            if token_id in params.stop_token_ids:
                self.stop_reason = token_id
                return "stop"
        return "length" if len(outputs) >= self.max_output_tokens else None

    def extend(self, run: Sequence[int]) -> tuple[tuple[int, ...], str | None]:
        """Take a run of sampled tokens, up to the last one if some token ends the request. Returns the tokens taken,
        and what ``append`` returns for the last of them."""
        for count, token_id in enumerate(run, 1):
            reason = self.append(token_id)
            if reason is not None:
                return tuple(run[:count]), reason
        return tuple(run), None

    def fork(self, request_id: str, token_id: int) -> Request:
        """Another beam of the same search, beside this one: a copy, but with ``token_id`` as its newest token.

        Only between two steps, when no token is in flight.
        """
        beam = Request(
            request_id,
            self.prompt_token_ids,
            self.params,
            eos_token_ids=self.eos_token_ids,
            max_total_tokens=self.max_total_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            weight=self.weight,
            arrival=self.arrival,
            arrival_time=self.arrival_time,
            adapter=self.adapter,
        )
        beam.output_token_ids = [*self.output_token_ids[:-1], token_id]
        beam.digests = list(self.digests)  # of the blocks computed so far, which they share
        beam.num_cached, beam.scheduled_time = self.num_cached, self.scheduled_time
        beam.num_charged = self.num_charged
        beam.status, beam.beams = self.status, self.beams
        beam.num_computed = beam.num_committed = self.num_computed
        return beam
