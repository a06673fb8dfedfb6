"""``Scheduler``: which tokens of which request run in the next step, and what their results mean.

Knows requests, block counts and order; does not know clocks, tensors, text or files. It decides and does not act:
``schedule(now)`` returns a ``StepPlan``, the caller runs it, and ``commit(plan, results)`` takes the sampled tokens.
More plans may be made before the first is committed; tokens still in flight are then placeholders.

Drafts. A decode may compute tokens that are only guessed to come next. The plan then asks for a row of logits for each
of them too, and the commit takes a run: the guesses that were right, and one more token. What was computed past the run
is taken back, with its blocks (``Drafts``). Without a draft the run is one token.

Order. Requests are ranked by ``priority + arrival_time / priority_aging``, then by arrival. Seconds of waiting thus
weigh like priority, and only the finitely many requests that arrive soon enough can ever go before a given one. A rank
never changes. The running request that is first in rank is never preempted, and it was checked to fit in the pool when
it was added. So it always progresses and ends, and another one becomes the first.

Tenants. Rank orders the requests of one tenant. Between tenants the least served goes first (``FairShares``), when
prompts are admitted and when they share the budget of a step. A decode that needs a block takes it from the tenant
served most. A tenant that was served less than another and has fewer requests running takes a place from it, so that it
need not wait for long answers to end. A tenant is charged for tokens that are computed for the first time: cached
prompts and tokens computed again after a preemption cost nothing.

Reuse of blocks. The blocks of a request that ends or is preempted may be given away at once, even while a
plan in flight still reads or writes them, because plans run one after another in the order they were made:
the next holder writes them in a later plan, and reads only what it wrote itself or found in the prefix
cache. A block can be found only after a committed plan completed it, and plans in flight write past a
request's committed positions, so they never touch it. The runner's part: plans in order; within a plan
first the copies, then the rest. Copies also bring blocks to memory and back (``BlockTiers``): the same order holds.

Pipelines. Where plans run in several stages, as many are in flight. A token can then not be computed before it is
known, so a request decodes in one plan at a time. Each plan takes its share of the running requests, by rank: who is
left out comes next, since those before it are in flight by then. The chunks of a prompt follow each other through the
stages.

Beams. The beams of one search are ranked together and decode in the same step or not at all, so that the search sees
all of them when it chooses. They are admitted and preempted together, so that no beam holds blocks while it waits for
another. After a commit, ``finish`` drops a beam and ``fork`` adds one.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice

from qserve.runtime.backlog import Backlog
from qserve.runtime.block_tiers import Transfer
from qserve.runtime.blocks import BlockManager
from qserve.runtime.digests import chain_digests
from qserve.runtime.drafts import Drafts
from qserve.runtime.fairness import FairShares
from qserve.runtime.limits import SchedulerConfig, fit
from qserve.runtime.request import PLACEHOLDER, Request, Status
from qserve.runtime.sampling import RequestError
from qserve.runtime.step_plan import RequestUpdate, ScheduledSequence, StepPlan

NO_DRAFTS: Mapping[str, Sequence[int]] = {}
# Prompt tokens in a step for tenants that were served more than others: few enough that the step is short for the next
# request, and enough for an efficient matrix product.
AHEAD_TOKENS = 32
SHORT_PROMPT = 128  # prompt tokens for which others' decodes wait a step: it takes no longer than theirs would


class Scheduler:
    """Continuous batching with chunked prefill under one token budget. Not thread-safe.

    ``num_preemptions`` counts events; ``prefix_queries`` counts the prompt tokens of admitted requests that may use the
    prefix cache, ``prefix_hits`` those of them that were there already. ``drafts`` counts drafts.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.backlog = Backlog(config.max_waiting, config.waiting_tokens_limit)
        self.drafts = Drafts(config, blocks)
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._step = 0
        self._shares = FairShares(credit=config.max_model_len)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # both queues in order of rank
        self._running: list[Request] = []
        self._in_flight: deque[tuple[StepPlan, tuple[Request, ...]]] = deque()
        self._preempted: list[str] = []  # since the last plan
        self._copies: list[tuple[int, int]] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans made and not committed."""
        return len(self._in_flight)

    @property
    def num_unused_slots(self) -> int:
        """KV positions that running requests hold but have not filled: ends of blocks, and prompts still to compute."""
        filled = len(self.blocks.windows) * sum(request.num_computed for request in self._running)
        return self.blocks.num_table_entries * self.blocks.block_size - filled

    def running(self) -> tuple[Request, ...]:
        """The running requests, in order of rank; only to be read."""
        return tuple(self._running)

    def waiting(self) -> tuple[Request, ...]:
        """The waiting requests, preempted ones too, in order of rank; only to be read."""
        return tuple(self._waiting)

    def request_ids(self) -> set[str]:
        """The ids of requests that have not ended."""
        return set(self._requests)

    def has_work(self) -> bool:
        """Whether some request has not ended, or some plan is not committed."""
        return bool(self._requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``RequestError`` if it can never run, ``QueueFullError`` if it may be sent again."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is in use", "request_id")
        parent = request.parent
        if parent and not parent.is_finished and self._requests.get(parent.request_id) is not parent:
            raise RequestError(f"parent {parent.request_id} was not added to this scheduler", "parent")
        # The first of several choices is refused if any of them would be; beams wait as one.
        choices = 1 if parent or request.params.use_beam_search else request.params.n
        self.backlog.require_room(request.tenant, choices, request.num_queued)
        fit(request, self.config, self.blocks)
        if request.params.use_beam_search:
            request.beams = [request]
        self._requests[request.request_id] = request
        self.backlog.add(request.tenant, request.num_queued)
        self._shares.join(request.tenant, request.priority)
        insort(self._waiting, request, key=self._rank)

    def fork(self, parent_id: str, child_id: str, token: int) -> Request:
        """Add a beam beside ``parent_id``, whose newest token was just committed: the same, but with ``token`` for it.

        The child shares the parent's blocks and runs or waits as it does. Raises ``ValueError`` where the parent is no
        beam between two steps, or ``child_id`` is taken.
        """
        parent = self._requests[parent_id]
        if not parent.beams or parent.num_plans or not parent.output_token_ids or child_id in self._requests:
            raise ValueError(f"{parent_id} cannot be forked as {child_id}")
        while parent.status is Status.RUNNING and self.num_running == self.config.max_num_seqs:
            self._preempt_last()
        child = parent.fork(child_id, token)
        if parent.status is Status.RUNNING:
            self.blocks.fork(parent_id, child_id, parent.num_computed)
            self._shares.take_place(child.tenant)
        insort(self._running if parent.status is Status.RUNNING else self._waiting, child, key=self._rank)
        self._shares.join(child.tenant, child.priority)
        self._requests[child_id] = child
        child.beams.append(child)
        return child

    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> bool:
        """End a request for a cause only the caller sees, as a stop string. False if it is not there."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason, stop_reason)
        return request is not None

    def schedule(self, now: float, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepPlan | None:
        """Decide the next step; None when nothing can run before a commit, a new request or a block from the disk.

        Each decode gets its one token, set aside from the budget, so that no prompt crowds it out; if it needs a block,
        another request may be preempted for it. The rest of the budget goes to prompts: the least served tenant is
        next, with its running prefills and then with its waiting requests, by rank. No request is admitted past one
        that must wait for room. ``now`` (seconds) becomes the ``scheduled_time``.

        ``drafts``: by request, guesses of the tokens that follow its newest one. They are cut to the room there is, and
        left out for beams and where the newest token is not known yet.
        """
        running = Status.RUNNING  # looking up an enumeration member takes longer than the test here
        decodes = [request for request in self._running if _can_decode(request)]
        if self.config.num_stages > 1:
            decodes = self._share(decodes)
        for request in decodes:
            if request.status is running and not self.blocks.is_writable(request.request_id, request.num_computed):
                self._grow(request)
        if self.blocks.has_windows:
            self._grow_prefills()
            decodes = [r for r in decodes if r.status is not running or self._can_write(r)]
        decodes = [request for request in decodes if request.status is running]
        # Prompts first: admitting one may preempt a decode, and nothing may be planned for that one by then.
        planned: list[tuple[Request, ScheduledSequence]] = []
        active: list[Request] = []
        if len(decodes) < len(self._running):
            active = [r for r in self._running if not r.is_decoding and r.num_computed < r.num_tokens]
        if self._waiting or active:
            planned = self._prefill(active, self.config.max_num_batched_tokens - len(decodes), now)
        pausing = self._giving_way(planned) if planned else ()
        # Decodes go first, together with requests back from a preemption that lack only the newest token.
        first = [pair for pair in planned if not pair[1].is_prefill]
        decoded = [
            (request, self._decode(request))
            for request in decodes
            if request.status is running and request.tenant not in pausing
        ]
        prefills = [pair for pair in planned if pair[1].is_prefill]
        if drafts:
            # Each running request keeps a block: else the next decode would preempt another for a guess.
            self._copies += self.drafts.add(decoded, [*first, *prefills], drafts, spare=self.num_running)
        parts = [first + decoded, prefills]
        if any(request.adapter >= 0 for part in parts for request, _ in part):  # those of an adapter run side by side
            parts = [sorted(part, key=lambda pair: pair[0].adapter) for part in parts]
        planned = parts[0] + parts[1]
        return self._plan(planned) if planned else None

    def commit(self, plan: StepPlan, results: Mapping[str, Sequence[int]]) -> list[RequestUpdate]:
        """Take the runs of tokens a plan sampled, ``request_id -> tokens``, and report what became of each request.

        A run is the part of the draft that was right, and the token that follows it; without a draft, one token. If a
        token of it ends the request, the rest is dropped. Plans are committed in the order they were made. A request
        that has ended meanwhile needs no result; one that was preempted keeps its tokens. A pooled request ends,
        without a token, with its prompt. Raises ``ValueError``, changing nothing, for a plan out of order, a missing
        result, or a run that does not match the draft.
        """
        if not self._in_flight or self._in_flight[0][0] != plan:
            oldest = f"plan {self._in_flight[0][0].step} is the oldest" if self._in_flight else "no plan is"
            raise ValueError(f"cannot commit plan {plan.step}: {oldest} in flight")
        pairs = list(zip(plan.sequences, self._in_flight[0][1], strict=True))
        for sequence, request in pairs:
            if sequence.num_sampled and not request.is_finished:
                run = results.get(sequence.request_id)
                if not run:
                    raise ValueError(f"plan {plan.step} has no result for {sequence.request_id}")
                more = len(run) - 1
                if more and (more >= sequence.num_sampled or tuple(run[:-1]) != sequence.draft[:more]):
                    raise ValueError(f"plan {plan.step}: {tuple(run)} does not follow the draft {sequence.draft}")
        self._in_flight.popleft()
        running, finished, size = Status.RUNNING, Status.FINISHED, self.blocks.block_size
        updates = []
        for sequence, request in pairs:
            wanted = sequence.num_sampled
            request.num_plans -= 1
            request.num_in_flight -= wanted
            if request.status is finished:
                continue
            tokens, reason = request.extend(results[request.request_id]) if wanted else ((), None)
            # Of what a draft computed, this much belongs to tokens that really came.
            end = sequence.start + len(sequence.token_ids) - wanted + len(tokens)
            if request.status is running:
                if end // size > request.num_committed // size:
                    self._publish(request, end)
                request.num_committed = end
                if self.blocks.has_windows:
                    self.blocks.release_passed(request.request_id, end)
            if wanted > 1:
                self.drafts.take_back(request, end, accepted=len(tokens) - 1)
                self._shares.charge(request.tenant, 0, len(tokens) - 1, request.weight)
            if not wanted:
                if not request.is_pooled or end < request.num_prompt:
                    continue
                reason = "stop"
            if reason is not None:
                self._end(request, reason, request.stop_reason)
            updates.append(RequestUpdate(request.request_id, tokens, reason, request.stop_reason))
        return updates

    def transfers(self) -> tuple[Transfer, ...]:
        """What the disk may begin once the plans made so far have run. Nothing while copies wait for a plan."""
        return self.blocks.tiers.orders() if self.blocks.tiers and not self.has_copies else ()

    @property
    def has_copies(self) -> bool:
        """Whether copies wait for a plan, so that what blocks and slots are to hold is not in all of them yet."""
        self._copies += self.blocks.take_copies()
        return bool(self._copies)

    def forget(self) -> None:
        """Forget what the blocks hold, because plans failed. Every request has ended."""
        self._copies.clear()
        self.blocks.forget()

    def check(self) -> None:
        """Raise ``AssertionError`` unless queues, counters, block tables and plans in flight agree."""
        self.blocks.check()
        assert {id(r) for r in self._requests.values()} == {id(r) for r in (*self._waiting, *self._running)}
        assert len(self._requests) == len(self._waiting) + len(self._running), "a request is in two queues"
        assert all(request_id == r.request_id for request_id, r in self._requests.items())
        self._shares.check(*(Counter(r.tenant for r in queue) for queue in (self._requests.values(), self._running)))
        new = [r for r in self._waiting if r.status is Status.WAITING]
        tokens: Counter[str] = Counter()
        for request in new:
            tokens[request.tenant] += request.num_queued
        self.backlog.check(Counter(r.tenant for r in new), tokens)
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=self._rank), "a queue is out of order"
        assert len(self._running) <= self.config.max_num_seqs
        tables, size = self.blocks.tables(), self.blocks.block_size
        assert tables.keys() == {r.request_id for r in self._running}, "who runs holds a table"
        plans: Counter[int] = Counter()
        samples: Counter[int] = Counter()
        drafted: Counter[int] = Counter()
        for number, (plan, requests) in enumerate(self._in_flight, self._step - len(self._in_flight)):
            assert plan.step == number and 0 < plan.num_tokens <= self.config.max_num_batched_tokens
            assert len({s.request_id for s in plan.sequences}) == len(plan.sequences) == len(requests)
            plans.update(id(r) for r in requests)
            assert sum(s.num_sampled for s in plan.sequences) <= self.config.logits_limit
            assert self.config.num_stages == 1 or all(PLACEHOLDER not in s.token_ids for s in plan.sequences)
            for sequence, request in zip(plan.sequences, requests, strict=True):
                samples[id(request)] += sequence.num_sampled
                drafted[id(request)] += len(sequence.draft)
        for request in self._requests.values():
            assert request.num_plans == plans[id(request)] and request.num_in_flight == samples[id(request)]
            assert request.num_drafted == drafted[id(request)]
            assert not request.num_drafted or request.num_plans == 1, "it was planned beside its draft"
            assert len(request.output_token_ids) + request.num_in_flight <= request.max_output_tokens
        for request in self._requests.values():
            assert request in request.members and len({member.status for member in request.members}) == 1
        for request in self._waiting:
            assert request.status in (Status.WAITING, Status.PREEMPTED)
            assert request.num_computed == request.num_committed == 0
        for request in self._running:
            assert request.status is Status.RUNNING
            assert 0 <= request.num_committed <= request.num_computed < request.num_tokens + request.is_pooled
            for window, (begin, end) in zip(self.blocks.windows, self.blocks.spans(request.request_id), strict=True):
                seen = max(request.num_committed - window + 1, 0) if window else 0
                assert begin <= seen, "keys are gone that the next query sees"
                assert request.num_computed <= end <= self.blocks.blocks_for(request.max_positions) * size
                if request.output_token_ids and not request.num_plans:
                    assert end <= self.blocks.blocks_for(request.num_tokens) * size, "blocks of a draft are held"
                if window and not request.num_plans and request.is_decoding:
                    assert end - begin <= window + 2 * size, "more is held than a window and the blocks at its ends"

    def _rank(self, request: Request) -> tuple[float, int]:
        return request.priority + request.arrival_time / self.config.priority_aging, request.arrival

    def _turn(self, request: Request) -> tuple[float, int, tuple[float, int]]:
        """The order between requests of different tenants: the lowest goes first, the highest is preempted first."""
        tenant = request.tenant
        return self._shares.score(tenant, request.priority), self._shares.places(tenant), self._rank(request)

    def _awaits_parent(self, request: Request) -> bool:
        """Whether its parent will have computed the prompt that they share: its last token too where it is scored, so
        that its log-probabilities are told before anything of the others."""
        parent = request.parent
        if parent and parent.is_finished:
            parent = request.parent = None  # its prompt may still be in the prefix cache
        return parent is not None and parent.num_committed < max(request.num_prompt - (not parent.is_scored), 1)

    def _awaits_blocks(self, request: Request) -> bool:
        """Whether blocks that it can use come from the disk. They are asked for once, so it never waits for long."""
        if self.blocks.tiers is None:
            return False
        ask, request.was_fetched = not request.was_fetched, True
        return self.blocks.awaits(self._reusable(request), ask=ask)

    def _reusable(self, request: Request) -> list[bytes]:
        """The digests under which it may find blocks. At least one token is left to compute now: the last, whose logits
        are needed, or the one before a beam's last."""
        return [] if request.is_scored else self._digests(request, request.num_plannable - 1)

    def _prefill(self, active: list[Request], budget: int, now: float) -> list[tuple[Request, ScheduledSequence]]:
        """Plan up to ``budget`` prompt tokens, of the running ``active`` requests and of those that can be admitted."""
        full = self.num_running == self.config.max_num_seqs and self._shares.num_tenants == 1
        queues = self._by_tenant(active if full else [*active, *self._waiting])
        planned: list[tuple[Request, ScheduledSequence]] = []
        ahead, most = AHEAD_TOKENS, self.config.max_num_seqs
        while budget and queues:
            queue = min(queues.values(), key=lambda queue: self._turn(queue[0]))
            is_ahead = self._shares.is_ahead(queue[0].tenant)
            request = queue.popleft()
            if not queue or (is_ahead and ahead <= 0):
                del queues[request.tenant]
            if is_ahead and ahead <= 0:
                continue
            if request.status is not Status.RUNNING:
                if self._awaits_parent(request) or self._awaits_blocks(request):
                    continue
                # A request that was just preempted must get its tokens in flight first.
                waits = any(member.num_plans for member in request.members)
                if waits or not self._enter(request.members, now, planned):
                    queues = {
                        tenant: running
                        for tenant, queue in queues.items()
                        # Running requests come before waiting ones.
                        if (running := deque(r for r in islice(queue, most) if r.status is Status.RUNNING))
                    }
                    continue
            room = self.blocks.extend(
                request.request_id, self._stop(request, min(budget, ahead) if is_ahead else budget),
                spare=self.num_running,
            )  # fmt: skip
            if room <= request.num_computed:
                continue
            planned.append((request, self._advance(request, room)))
            num_tokens = len(planned[-1][1].token_ids)
            budget -= num_tokens
            ahead -= num_tokens
        return planned

    def _by_tenant(self, requests: list[Request]) -> dict[str, deque[Request]]:
        """The queue of each tenant, in the order given."""
        if requests and self._shares.num_tenants == 1:  # no loop, however many wait
            return {requests[0].tenant: deque(requests)}
        queues: dict[str, deque[Request]] = {}
        for request in requests:
            queues.setdefault(request.tenant, deque()).append(request)
        return queues

    def _giving_way(self, planned: list[tuple[Request, ScheduledSequence]]) -> set[str]:
        """Tenants whose decodes wait for the next step, because this one has a short prompt of a less served tenant.

        Its first token then takes the time of its prompt, not that of all decodes. The others lose little: their next
        step is that much shorter. And this cannot go on, because what is computed now is charged.
        """
        prompts = {request.tenant for request, _ in planned}
        tenants = {request.tenant for request in self._running}
        if len(tenants) < 2 or not prompts or sum(len(each.token_ids) for _, each in planned) > SHORT_PROMPT:
            return set()
        ahead = {tenant for tenant in tenants if self._shares.is_ahead(tenant)}
        return ahead if prompts - ahead else set()

    def _enter(
        self, members: tuple[Request, ...], now: float, planned: list[tuple[Request, ScheduledSequence]]
    ) -> bool:
        """Admit ``members`` together, if need be in place of requests of tenants that hold more than their share."""
        request, count = members[0], len(members)
        while self.num_running + count > self.config.max_num_seqs or not self._admit(members, now):
            taken = {id(other) for other, _ in planned}
            mine = (self._shares.places(request.tenant) + count) / request.weight
            others = [
                other
                for other in self._last_of_tenants()
                if other.tenant != request.tenant
                and not any(id(member) in taken for member in other.members)
                and (self._shares.places(other.tenant) - len(other.members)) / other.weight >= mine
                and self._turn(other) > self._turn(request)
            ]
            if not others:
                return False
            self._preempt(max(others, key=self._turn))
        return True

    def _admit(self, members: tuple[Request, ...], now: float) -> bool:
        """Give waiting requests tables for all of their tokens and let them run, if there is room for all."""
        cached = [self._open(request) for request in members]
        missing = sum(
            self.blocks.missing(request.request_id, request.num_tokens, write_from=start, stepwise=True)
            for request, start in zip(members, cached, strict=True)
        )
        # One block to spare for each running request: else the next decode would preempt what was just admitted.
        if missing + self.num_running > self.blocks.num_free:
            for request in members:
                self.blocks.free(request.request_id)
            return False
        for request, start in zip(members, cached, strict=True):
            self._copies += self.blocks.allocate(
                request.request_id, request.num_tokens, write_from=start, stepwise=True
            )
            if request.status is Status.WAITING:
                self.backlog.remove(request.tenant, request.num_queued)
                request.num_cached, request.scheduled_time = start, now
                if not request.is_scored:
                    self.prefix_queries += request.num_tokens
                    self.prefix_hits += start
            request.num_computed = request.num_committed = start
            request.status, request.parent = Status.RUNNING, None
            self._waiting.remove(request)
            self._shares.take_place(request.tenant)
            insort(self._running, request, key=self._rank)
        return True

    def _open(self, request: Request) -> int:
        """Start the table of a waiting request with what others computed; returns the number of positions found."""
        parent, shared = request.parent, request.num_prompt - 1
        if parent and not request.is_scored and self.blocks.can_fork(parent.request_id, shared):
            # All but the last token: its logits choose the first output, and it is written into a copy.
            self.blocks.fork(parent.request_id, request.request_id, shared)
            return shared
        return self.blocks.open(request.request_id, self._reusable(request))

    def _share(self, decodes: list[Request]) -> list[Request]:
        """Those of ``decodes`` whose newest token is known, divided between the plans that can be made now, and no more
        than an equal share of all that run. Beams, which follow each other in rank, stay together."""
        known = [request for request in decodes if not request.num_in_flight]
        stages = self.config.num_stages
        count = min(-(-len(self._running) // stages), -(-len(known) // max(1, stages - self.num_in_flight)))
        while count < len(known) and known[count].beams and known[count].beams is known[count - 1].beams:
            count += 1
        return known[:count]

    def _can_write(self, request: Request) -> bool:
        """Whether its next position has room in all groups, and those of its beams."""
        if not request.beams:
            return self.blocks.is_writable(request.request_id, request.num_computed)
        return all(self.blocks.is_writable(each.request_id, each.num_computed) for each in request.beams)

    def _grow_prefills(self) -> None:
        """Make room for one more position of each prompt; further positions come where there is room for more."""
        for request in list(self._running):
            if request.status is not Status.RUNNING or request.is_decoding or request.num_plans:
                continue  # the commit of a plan in flight gives blocks back
            if request.num_computed < request.num_plannable and not self.blocks.is_writable(
                request.request_id, request.num_computed
            ):
                self._grow(request)

    def _grow(self, request: Request) -> None:
        """Make room for one more position, preempting others where it must, or itself."""
        total, written = request.num_computed + 1, request.num_computed
        while request.status is Status.RUNNING:
            if self.blocks.can_allocate(request.request_id, total, write_from=written):
                self._copies += self.blocks.allocate(request.request_id, total, write_from=written)
                return
            if self.blocks.has_windows and request.num_plans and not self._last_of_tenants():
                return  # it waits for a commit, which gives back what its windows have passed
            self._preempt_last()

    def _last_of_tenants(self) -> list[Request]:
        """Requests that may be preempted: the last in rank of each tenant, but never the first of all or its beams."""
        safe = len(self._running[0].members)  # beams follow each other in rank
        return list({request.tenant: request for request in self._running[safe:]}.values())

    def _preempt_last(self) -> None:
        """Preempt a request of the tenant that was served most."""
        self._preempt(max(self._last_of_tenants(), key=self._turn))

    def _preempt(self, request: Request) -> None:
        """Take its blocks. Its tokens stay, and their KV is computed again (or found in the cache) later."""
        for member in request.members:
            self._leave_running(member)
            self.blocks.free(member.request_id)
            member.status = Status.PREEMPTED
            member.num_computed = member.num_committed = 0
            member.was_fetched = False
            insort(self._waiting, member, key=self._rank)
            self._preempted.append(member.request_id)
            self.num_preemptions += 1

    def _decode(self, request: Request) -> ScheduledSequence:
        """Plan the newest token: as ``_advance`` does, where nothing of the prompt is left."""
        request_id, start = request.request_id, request.num_computed
        newest = PLACEHOLDER if request.num_in_flight else request.output_token_ids[-1]
        self._shares.charge(request.tenant, 0, 1, request.weight)
        request.num_computed = start + 1
        request.num_in_flight += 1
        request.num_plans += 1
        tables = self.blocks.block_tables(request_id)
        return ScheduledSequence(
            request_id, (newest,), start, tables, 1, False, adapter=request.adapter,
            state=self.blocks.state(request_id), saves=self.blocks.save_states(request_id, start, start + 1),
        )  # fmt: skip

    def _stop(self, request: Request, budget: int) -> int:
        """Where up to ``budget`` further tokens of a running request end."""
        start = request.num_computed
        stop = min(request.num_tokens if request.is_decoding else request.num_plannable, start + budget)
        if request.is_scored and start < request.num_scored:
            stop = min(stop, request.num_scored)  # a chunk is asked for its rows as a whole or not at all
        return stop

    def _advance(self, request: Request, stop: int) -> ScheduledSequence:
        """Plan the tokens of a running request before position ``stop``."""
        start = request.num_computed
        scores = request.is_scored and request.num_scored <= start < request.num_prompt
        sequence = ScheduledSequence(
            request_id=request.request_id,
            token_ids=request.tokens(start, stop),
            start=start,
            block_tables=self.blocks.block_tables(request.request_id),
            num_sampled=int(stop == request.num_tokens and not request.is_pooled),
            is_prefill=not request.is_decoding,
            wants_prompt_logprobs=scores and request.params.prompt_logprobs is not None,
            wants_prompt_states=scores and request.is_pooled,
            adapter=request.adapter,
            state=self.blocks.state(request.request_id),
            saves=self.blocks.save_states(request.request_id, start, stop),
        )
        if scores:
            request.num_scored = min(stop, request.num_prompt)
        fresh = max(0, min(stop, request.num_prompt) - max(start, request.num_charged))
        request.num_charged = max(request.num_charged, min(stop, request.num_prompt))
        self._shares.charge(request.tenant, fresh, sequence.num_sampled, request.weight)
        request.num_computed = stop
        request.num_in_flight += sequence.num_sampled
        request.num_plans += 1
        return sequence

    def _plan(self, planned: list[tuple[Request, ScheduledSequence]]) -> StepPlan:
        requests, sequences = zip(*planned)
        self._copies += self.blocks.take_copies()
        if self.blocks.tiers is not None:
            self.blocks.tiers.planned()
        states = tuple(self.blocks.take_state_copies())
        plan = StepPlan(self._step, sequences, tuple(self._preempted), tuple(self._copies), states)
        self._in_flight.append((plan, requests))
        self._step += 1
        self._preempted, self._copies = [], []
        return plan

    def _digests(self, request: Request, num_tokens: int) -> list[bytes]:
        """Digests of the full blocks in the first ``num_tokens`` tokens, all of them known."""
        if not self.blocks.enable_prefix_caching:
            return []
        size, have = self.blocks.block_size, len(request.digests)
        count = num_tokens // size
        if count > have:
            tokens = request.tokens(have * size, count * size)
            parent = request.digests[-1] if have else None
            request.digests += chain_digests(tokens, size, salt=request.cache_salt, parent=parent)
        return request.digests[:count]

    def _publish(self, request: Request, end: int) -> None:
        """Let others find the blocks that are complete once the positions before ``end`` are committed."""
        first = request.num_committed // self.blocks.block_size
        for index, digest in enumerate(self._digests(request, end)[first:], first):
            self.blocks.publish(request.request_id, index, digest)

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self._shares.give_place(request.tenant)

    def _end(self, request: Request, reason: str, stop_reason: str | int | None) -> None:
        self._shares.leave(request.tenant)
        if request.status is Status.RUNNING:
            self._leave_running(request)
            self.blocks.free(request.request_id)
        else:
            self._waiting.remove(request)
            if request.status is Status.WAITING:
                self.backlog.remove(request.tenant, request.num_queued)
        del self._requests[request.request_id]
        if request.beams:
            request.beams.remove(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason, request.parent = reason, stop_reason, None


def _can_decode(request: Request) -> bool:
    """Whether only its newest token is to be computed. Beams wait until that holds, with a known token, for each."""
    if request.beams:
        return all(
            member.is_decoding and not member.is_fully_sampled and not member.num_in_flight for member in request.beams
        )
    # Written out instead of ``is_decoding`` and not ``is_fully_sampled``: every step asks it of every request.
    outputs, prompt = len(request.output_token_ids) + request.num_in_flight, len(request.prompt_token_ids)
    return (
        prompt <= request.num_computed == prompt + outputs - 1
        and outputs < request.max_output_tokens
        and not request.num_drafted
    )
