"""``Replica``: one engine of the fleet: the real scheduler and block manager, and a cost model for its model.

A step is planned when it begins and committed when it ends, as in the engine. A run of pure decode steps is written
down at once when it ends, or up to the current step when a request comes that may join it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from qserve.evals.simulator.cost import CostModel, shape_of
from qserve.evals.simulator.decode_run import DecodeRun, LeapingScheduler
from qserve.evals.simulator.records import Records, Usage
from qserve.evals.simulator.traffic import Arrival, prompt_tokens
from qserve.runtime.block_tiers import BlockTiers
from qserve.runtime.blocks import BlockManager
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request
from qserve.runtime.router import Placement
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.step_plan import StepPlan

LONGEST_LEAP = 64  # steps: steps computed beyond an interruption are wasted
_TOKEN = 0  # every request samples this: prompts differ, so histories differ


@dataclass(frozen=True)
class ReplicaConfig:
    """One engine. ``static`` admits a batch only when the last one has ended, and pays for the rows of requests that
    ended before the longest. Batches were served like this before continuous batching; the engine itself never does it.

    ``offload_blocks``: memory for blocks that the cache evicts, and for those of other replicas.

    ``leaps``: take runs of decode steps at once. The results are the same.
    """

    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    static: bool = False
    offload_blocks: int = 0
    leaps: bool = True


@dataclass
class _Leap:
    """Decode steps in progress: the end of each, and the clock and the usage before them."""

    run: DecodeRun
    start: float
    ends: list[float]


class Replica:
    """``begin`` and ``finish`` alternate; ``add`` at any time between. Times never go back."""

    def __init__(
        self,
        number: int,
        config: ReplicaConfig,
        cost: CostModel,
        records: Records,
        now: float = 0.0,
    ) -> None:
        self.number = number
        self.config = config
        self.records = records
        self.tiers = BlockTiers(config.offload_blocks) if config.offload_blocks else None
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.prefix_caching, tiers=self.tiers)
        self.scheduler = LeapingScheduler(config.scheduler, self.blocks)
        self.usage = Usage(born=now)
        self.load = 0  # requests that have not ended
        self.begun = 0  # requests whose first token is there
        self.draining = False
        self.end: float | None = None  # of the step or steps in progress
        self.version = 0  # counts changes of the end, to tell old ends
        self._cost = cost
        self._leaps = config.leaps and not config.static
        self._plan: StepPlan | None = None
        self._tokens = 0  # tokens of the plan
        self._leap: _Leap | None = None
        self._start = 0.0
        self._requests: dict[str, Request] = {}
        self._placements: dict[str, Placement] = {}
        self._then: dict[str, Callable[[], None]] = {}
        self._first: dict[str, float] = {}
        self._pending: deque[Request] = deque()  # of static batching: those for the next batch
        self._batch = 0
        self._sizes: dict[int, SamplingParams] = {}

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self._pending)

    def receive(self, digests: Iterable[bytes]) -> None:
        """Keep blocks that another replica has computed, as many as there is memory for."""
        assert self.tiers is not None
        for digest in digests:
            if self.blocks.find((0, digest)) is None:
                self.tiers.receive((0, digest))

    def add(
        self, arrival: Arrival, index: int, placement: Placement, digests: Sequence[bytes] = (), *, now: float,
        then: Callable[[], None] | None = None,
    ) -> bool:  # fmt: skip
        """Queue a request; False where the scheduler refuses it. A leap that it may join is cut short first.

        ``placement`` is told of its first token and its end; ``digests`` are those of its prompt, where they are known.
        ``then``: called at its end instead of recording it.
        """
        params = self._sizes.get(arrival.output)
        if params is None:
            params = SamplingParams(max_tokens=arrival.output, ignore_eos=True, temperature=0.0)
            self._sizes[arrival.output] = params
        request = Request(
            str(index), prompt_tokens(arrival, index), params, arrival=index, arrival_time=arrival.time
        )
        request.digests = list(digests)
        try:
            if self.config.static:
                self._keep(request)
            else:
                self.scheduler.add(request)
        except RequestError:
            return False
        self._requests[request.request_id] = request
        self._placements[request.request_id] = placement
        if then is not None:
            self._then[request.request_id] = then
        self.load += 1
        if self._leap is not None and self.scheduler.num_running < self.config.scheduler.max_num_seqs:
            self._cut(self._leap, now)
        return True

    def begin(self, now: float, slowed: float = 1.0) -> bool:
        """Start the next step, or the next steps, at ``now``; False where there is nothing to do. A step takes
        ``slowed`` times as long as it costs; steps that are taken at once do not."""
        self._start = now
        if self.config.static:
            self._admit_batch()
        run = self.scheduler.decode_run() if self._leaps else None
        if run is None or not self._begin_leap(run, now):
            self._plan = self.scheduler.schedule(now)
            if self._plan is None:
                self.end = None
                return False
            tokens, rows, prefill_kv, decode_kv = shape_of(self._plan)
            self._tokens = tokens
            padded = max(0, self._batch - self.scheduler.num_running)
            if padded:
                longest = max(s.start + len(s.token_ids) for s in self._plan.sequences)
                tokens, rows, decode_kv = tokens + padded, rows + padded, decode_kv + padded * longest
            self.end = now + slowed * self._cost.seconds(tokens, rows, prefill_kv, decode_kv)
        self.version += 1
        return True

    def finish(self) -> bool:
        """Commit the steps that ended at ``end``. Returns whether they computed a part of a prompt."""
        assert self.end is not None
        end = self.end
        if self._leap is not None:
            self._commit_leap(self._leap)
            self._leap = None
            return False
        plan = self._plan
        assert plan is not None
        self._plan = None
        self.usage.step(end - self._start, self._tokens, len(plan.sequences), self.blocks.num_used)
        results = {sequence.request_id: (_TOKEN,) for sequence in plan.sequences if sequence.num_sampled}
        first = self._first
        for update in self.scheduler.commit(plan, results):
            if update.request_id not in first:
                first[update.request_id] = end
                self.begun += 1
                request = self._requests[update.request_id]
                self._placements[update.request_id].started(request.num_cached / request.num_prompt)
            if update.finish_reason is not None:
                self._ended(update.request_id, end)
        return not plan.is_decode

    def close(self, now: float) -> Usage:
        """Its usage, at the end of its life. Raises ``AssertionError`` where a request or a block was lost."""
        self.scheduler.check()
        assert not self.load and not self.scheduler.has_work(), "a replica ends with requests"
        assert self.blocks.num_used == 0, "a block was lost"
        scheduler = self.scheduler
        return replace(
            self.usage,
            died=now,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def _begin_leap(self, run: DecodeRun, now: float) -> bool:
        """Lay out the ends of the steps, as many as there are blocks for; False where it is not worthwhile."""
        seconds, ends, sequences, positions = self._cost.seconds, [], run.sequences, run.positions
        free, size = self.blocks.num_free, self.config.block_size
        clock = now
        for step in range(min(run.steps, LONGEST_LEAP)):
            free -= run.new_blocks[step % size]
            if free < 0:
                break
            clock += seconds(sequences, sequences, 0, positions)
            positions += sequences
            ends.append(clock)
        if len(ends) < 2:
            return False
        self._leap = _Leap(run, now, ends)
        self.end = clock
        return True

    def _cut(self, leap: _Leap, now: float) -> None:
        """Let the step in progress at ``now`` be the last of the leap."""
        del leap.ends[bisect_left(leap.ends, now) + 1 :]
        self.end = leap.ends[-1]
        self.version += 1

    def _commit_leap(self, leap: _Leap) -> None:
        start, used, sequences = leap.start, self.blocks.num_used, leap.run.sequences
        for step, end in enumerate(leap.ends):
            used += leap.run.new_blocks[step % self.config.block_size]
            self.usage.step(end - start, sequences, sequences, used)
            start = end
        for request_id in self.scheduler.leap(len(leap.ends), _TOKEN):
            self._ended(request_id, start)

    def _ended(self, request_id: str, end: float) -> None:
        request, first = self._requests.pop(request_id), self._first.pop(request_id)
        self._placements.pop(request_id).ended()
        self.load -= 1
        if (then := self._then.pop(request_id, None)) is not None:
            then()
            return
        self.records.add(
            request.arrival,
            request.arrival_time,
            request.scheduled_time if request.scheduled_time is not None else first,
            first,
            end,
            request.num_prompt,
            len(request.output_token_ids),
        )

    def _keep(self, request: Request) -> None:
        """Queue for a later batch a request that the scheduler would take."""
        config, size = self.config.scheduler, self.config.block_size
        if request.num_prompt + request.max_output_tokens > config.max_model_len:
            raise RequestError("longer than the context")
        if -(-request.max_positions // size) > self.config.num_blocks:
            raise RequestError("larger than the pool")
        if len(self._pending) >= config.max_waiting:
            raise RequestError("the queue is full")
        self._pending.append(request)

    def _admit_batch(self) -> None:
        """If the last batch has ended, start the next, as large as places and blocks for all of its tokens allow."""
        if self.scheduler.has_work():
            return
        self._batch, free = 0, self.config.num_blocks
        while self._pending and self._batch < self.config.scheduler.max_num_seqs:
            # One block to spare for each: the scheduler keeps as many free when it admits.
            free -= self.blocks.blocks_for(self._pending[0].max_positions) + 1
            if free < 0 and self._batch:
                break
            self.scheduler.add(self._pending.popleft())
            self._batch += 1
