"""``EngineSnapshot``: an engine at one moment between two steps: what runs, what waits, and who holds which block.

Plain data, cheap to take. Rendering is elsewhere. Holds no token and no text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qserve.runtime.journal import FirstToken, Journal, StepRecord
from qserve.runtime.request import Request
from qserve.runtime.scheduler import Scheduler

MAX_WAITING = 32


@dataclass(frozen=True, slots=True)
class RequestState:
    """One sequence. Counts are in tokens, ``age`` is in seconds since it arrived.

    ``state`` is waiting, preempted, prefill or decode. ``cached_tokens``: tokens of the prompt that were not computed.
    ``blocks``: the blocks that it holds, in all groups of layers; none unless it runs.
    """

    request_id: str
    state: str
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    age: float
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """``time`` is in seconds on the engine's clock, as the times of the records are.

    Attributes:
        running: in order of rank.
        waiting: the first ``MAX_WAITING`` of the ``num_waiting``, in order of rank.
        cached_blocks: blocks that nobody holds and whose content can be found again.
        steps, first_tokens: the last records, oldest first.
        prompt_tokens, output_tokens: computed and sampled since the start.
    """

    time: float
    block_size: int
    num_blocks: int
    running: tuple[RequestState, ...]
    waiting: tuple[RequestState, ...]
    num_waiting: int
    cached_blocks: tuple[int, ...]
    steps: tuple[StepRecord, ...]
    first_tokens: tuple[FirstToken, ...]
    prompt_tokens: int
    output_tokens: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int


def take(scheduler: Scheduler, journal: Journal, now: float) -> EngineSnapshot:
    """The state as it is; to be called by the thread that owns the scheduler."""
    blocks, tables = scheduler.blocks, scheduler.blocks.tables()

    def states(requests: Iterable[Request]) -> tuple[RequestState, ...]:
        return tuple(
            RequestState(
                request.request_id,
                ("decode" if request.is_decoding else "prefill")
                if request.request_id in tables
                else request.status.value,
                request.num_prompt,
                request.num_computed,
                request.num_cached,
                len(request.output_token_ids),
                max(0.0, now - request.arrival_time),
                tables.get(request.request_id, ()),
            )
            for request in requests
        )

    return EngineSnapshot(
        time=now,
        block_size=blocks.block_size,
        num_blocks=blocks.num_blocks,
        running=states(scheduler.running()),
        waiting=states(scheduler.waiting()[:MAX_WAITING]),
        num_waiting=scheduler.num_waiting,
        cached_blocks=blocks.evictable(),
        steps=journal.steps(),
        first_tokens=journal.first_tokens(),
        prompt_tokens=journal.prompt_tokens,
        output_tokens=journal.output_tokens,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        num_preemptions=scheduler.num_preemptions,
        num_draft_tokens=scheduler.drafts.num_draft_tokens,
        num_accepted_tokens=scheduler.drafts.num_accepted_tokens,
    )
