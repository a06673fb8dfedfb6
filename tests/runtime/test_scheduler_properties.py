"""The scheduler driven at random, with a fake model whose KV cache knows what it holds.

The fake model is deterministic: the KV of a position is a hash of the salt and of all tokens up to it, and
the next token is a function of that hash. So an oracle knows every request's tokens in advance, and at each
step the fake runner can prove that every position a request reads holds the history of that very request,
whoever wrote it: wrong sharing, reuse of a block that is still read, a stale cache or a forgotten copy is
caught when it happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from zlib import crc32

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qserve.runtime.backlog import QueueFullError
from qserve.runtime.block_tiers import BlockTiers, Key, Outcome, Transfer
from qserve.runtime.blocks import BlockManager
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.scheduler import Scheduler
from qserve.runtime.state_slots import StateSlots
from qserve.runtime.step_plan import ScheduledSequence, StepPlan

VOCAB = 11
EOS = 0
STOP = 1
WRONG = -2  # what is in a position that a wrong guess wrote
# Prompts are heads of two texts, so that prefixes are often shared, with or without a tail of their own.
TEXTS = tuple(tuple((i * i + text) % VOCAB for i in range(40)) for text in (0, 3))


@dataclass
class Oracle:
    """What a request's tokens and their KV must be, by brute force."""

    request: Request
    aborted: bool = False
    rows: list[int] = field(default_factory=list)  # prompt positions whose log-probabilities were delivered
    tokens: list[int] = field(init=False)
    kv: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.kv = [*self.request.prompt_token_ids, *self.request.output_token_ids], []
        self.extend()

    def extend(self) -> None:
        """Hash up to the newest token and choose the next (plans in flight may compute past the end)."""
        while len(self.kv) < len(self.tokens):
            previous = self.kv[-1] if self.kv else crc32(self.request.cache_salt.encode())
            self.kv.append(hash((previous, self.tokens[len(self.kv)])))
        self.tokens.append(hash((self.kv[-1], -7)) % VOCAB)

    def upto(self, length: int) -> None:
        while len(self.tokens) <= length:
            self.extend()

    def outputs(self) -> tuple[list[int], str]:
        """The whole output and its finish reason, by the rules of the interface alone."""
        params, prompt = self.request.params, self.request.num_prompt
        if params.pooling is not None:
            return [], "stop"
        limit = max(1, self.request.max_total_tokens - prompt)
        limit = min(limit, params.max_tokens or limit)
        self.upto(prompt + limit)
        for count, token in enumerate(self.tokens[prompt : prompt + limit], 1):
            ended = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
            if ended and count > params.min_tokens:
                return self.tokens[prompt : prompt + count], "stop"
        return self.tokens[prompt : prompt + limit], "length"


class FakeRunner:
    """Runs plans in order on a KV store that remembers what was written, ``(block, offset) -> hash``.

    Each group of layers has its own, and reads no more than its window.
    """

    def __init__(self, block_size: int, windows: tuple[int, ...]) -> None:
        self.block_size = block_size
        self.windows = windows
        self.kv: dict[tuple[int, int], int] = {}  # blocks, and the slots of memory behind them
        self.states: dict[int, int] = {}  # by slot, where a model keeps any: that behind the tokens computed
        self.newest: dict[str, int] = {}
        self.begun: list[tuple[Transfer, list[int]]] = []  # with what was in the slot then
        self.disk: dict[Key, list[int]] = {}

    def begin(self, transfers: Iterable[Transfer], num_blocks: int) -> None:
        self.begun += [(each, self.slot(num_blocks + each.slot)) for each in transfers]

    def slot(self, number: int) -> list[int]:
        return [self.kv.get((number, offset), -1) for offset in range(self.block_size)]

    def end(self, index: int, done: bool, num_blocks: int, room: int) -> Outcome:
        """The disk makes a transfer, or fails to. It keeps ``room`` blobs."""
        transfer, content = self.begun.pop(index)
        number, dropped = num_blocks + transfer.slot, []
        assert not transfer.to_disk or content == self.slot(number), "a slot changed while it was written"
        if transfer.to_disk and done:
            while len(self.disk) >= room:
                dropped.append(next(iter(self.disk)))
                del self.disk[dropped[-1]]
            self.disk[transfer.key] = content
        elif not transfer.to_disk:
            done = done and transfer.key in self.disk
            for offset, value in enumerate(self.disk[transfer.key] if done else [WRONG] * self.block_size):
                self.kv[number, offset] = value
            if not done:
                self.disk.pop(transfer.key, None)
        return Outcome(transfer, done, tuple(dropped))

    def run(self, plan: StepPlan, oracles: dict[str, Oracle]) -> dict[str, tuple[int, ...]]:
        size = self.block_size
        for source, destination in plan.copies:
            for offset in range(size):
                self.kv[destination, offset] = self.kv.get((source, offset), -1)
        for source, destination in plan.state_copies:
            self.states[destination] = self.states.get(source, WRONG)
        slots = [s.state for s in plan.sequences if s.state >= 0]
        slots += [slot for s in plan.sequences for _, slot in s.saves]
        assert len(set(slots)) == len(slots), "two states are in one slot"
        written: set[tuple[int, int]] = set()
        runs: dict[str, tuple[int, ...]] = {}
        for sequence in plan.sequences:  # all of a step's writes come before its reads
            oracle, end = oracles[sequence.request_id], sequence.start + len(sequence.token_ids)
            oracle.upto(end)
            if sequence.state >= 0:
                begins = sequence.start == 0 or self.states[sequence.state] == oracle.kv[sequence.start - 1]
                assert begins, f"{sequence} goes on from a foreign state"
                self.states[sequence.state] = oracle.kv[end - 1]
                for tokens, slot in sequence.saves:
                    assert sequence.start < tokens <= end and tokens % size == 0
                    self.states[slot] = oracle.kv[tokens - 1]
            known, right = end - len(sequence.draft), True
            for position, given in enumerate(sequence.token_ids, sequence.start):
                token = self.newest[sequence.request_id] if given == -1 else given
                right = right and token == oracle.tokens[position]
                assert right or position >= known, "a wrong input token"
                for group, table in enumerate(sequence.block_tables):
                    slot = table[position // size], position % size
                    assert slot not in written, "two requests, or groups, write one position"
                    written.add(slot)
                    self.kv[slot] = oracle.kv[position] + group if right else WRONG
        for sequence in plan.sequences:
            oracle, end = oracles[sequence.request_id], sequence.start + len(sequence.token_ids)
            end -= len(sequence.draft)
            for guess in sequence.draft:
                if guess != oracle.tokens[end]:
                    break
                end += 1
            for group, (table, window) in enumerate(zip(sequence.block_tables, self.windows, strict=True)):
                for position in range(max(sequence.start - window + 1, 0) if window else 0, end):
                    slot = table[position // size], position % size
                    assert self.kv.get(slot) == oracle.kv[position] + group, (
                        f"{sequence} reads a foreign position {position} in group {group}"
                    )
            if sequence.wants_prompt_logprobs or sequence.wants_prompt_states:
                oracle.rows += range(sequence.start, min(end, oracle.request.num_prompt))
            assert not (sequence.num_sampled and oracle.request.params.pooling), "nobody wants its logits"
            if sequence.num_sampled:
                self.newest[sequence.request_id] = oracle.tokens[end]
                right = end - sequence.start - len(sequence.token_ids) + len(sequence.draft)
                runs[sequence.request_id] = tuple(oracle.tokens[end - right : end + 1])
        return runs


class SchedulerMachine(RuleBasedStateMachine):
    """Random work on a small pool. The class counts what all machines did since ``drive`` began."""

    count = 0
    preemptions = 0
    hits = 0
    copies = 0
    forks = 0
    mixed = 0  # steps with beams and with several tenants
    passed = 0  # sequences whose window gave blocks back
    accepted = 0  # tokens of drafts
    refused = 0
    loaded = 0  # blocks that came back from memory
    read = 0  # and from disk
    resumed = 0  # sequences that went on from a snapshot
    saved = 0  # snapshots

    @initialize(
        positions=st.integers(8, 44),
        block_size=st.sampled_from((1, 2, 2, 4)),
        caching=st.sampled_from((True, True, False)),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 12),
        extra_rows=st.integers(0, 8),
        depth=st.sampled_from((1, 2, 2, 3)),
        stages=st.sampled_from((1, 1, 2, 3)),
        windows=st.sampled_from(((0,), (0,), (0, 5), (6,), (0, 1, 9))),
        slots=st.sampled_from((30, 0, 12, 5, 1)),
        room=st.sampled_from((60, 60, 4, 0)),
        snapshots=st.sampled_from((None, None, None, 3, 8, 1, 0)),
    )
    def start(
        self,
        positions: int,
        block_size: int,
        caching: bool,
        max_num_seqs: int,
        extra_budget: int,
        extra_rows: int,
        depth: int,
        stages: int,
        windows: tuple[int, ...],
        slots: int,
        room: int,
        snapshots: int | None,
    ) -> None:
        config = SchedulerConfig(
            max_model_len=40,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_num_logits=max_num_seqs + extra_rows,
            max_waiting=12,
            max_waiting_tokens=150,
            num_stages=stages,
            priority_aging=4.0,
        )
        keeps_states = snapshots is not None  # such a model has neither drafts nor blocks elsewhere
        self.slots, self.room = slots if caching and not keeps_states else 0, room

        def make(tiers: BlockTiers | None) -> Scheduler:
            states = StateSlots(max_num_seqs, snapshots, block_size, 4) if snapshots is not None else None
            blocks = len(windows) * (positions // block_size)
            return Scheduler(config, BlockManager(blocks, block_size, caching, windows, tiers, states))

        self.make = make
        self.runner = FakeRunner(block_size, windows)
        self.scheduler = self.make(self.empty_tiers())
        self.told = set(self.scheduler.blocks.watch())
        self.depth = depth
        self.now = 0.0
        self.oracles: dict[str, Oracle] = {}
        self.live: dict[str, Oracle] = {}
        self.not_run: deque[StepPlan] = deque()
        self.not_committed: deque[tuple[StepPlan, dict[str, tuple[int, ...]]]] = deque()

    def empty_tiers(self) -> BlockTiers | None:
        """As after a start: nothing is in memory."""
        return BlockTiers(self.slots, self.runner.disk if self.room else None) if self.slots else None

    @precondition(lambda self: self.scheduler.blocks.tiers and self.scheduler.blocks.tiers.stored > 3)
    @rule(event=st.sampled_from(("killed", "none", "none", "none", "fails")))
    def lose(self, event: str) -> None:
        """A step fails, or the process is killed: what was running ends, and only the disk is sure to be whole."""
        if event == "none":
            return
        blocks = self.scheduler.blocks
        for name in list(self.live):
            self.scheduler.finish(name, "error")
        self.live.clear()
        self.not_run.clear()
        self.not_committed.clear()
        for number in range(blocks.num_blocks):
            self.runner.kv |= {(number, offset): WRONG for offset in range(self.runner.block_size)}
        if event == "fails":
            while self.scheduler._in_flight:
                self.scheduler.commit(self.scheduler._in_flight[0][0], {})
            self.scheduler.forget()
            return
        self.runner.begun.clear()
        self.runner.kv.clear()
        self.count_all()
        self.scheduler = self.make(self.empty_tiers())
        self.told = set(self.scheduler.blocks.watch())

    @precondition(lambda self: self.runner.begun)
    @rule(data=st.data(), done=st.sampled_from((True, True, True, False)))
    def disk(self, data: st.DataObject, done: bool) -> None:
        self.transfer(data.draw(st.integers(0, len(self.runner.begun) - 1)), done)

    def transfer(self, index: int, done: bool) -> None:
        tiers = self.scheduler.blocks.tiers
        assert tiers is not None
        tiers.finish(self.runner.end(index, done, self.scheduler.blocks.num_blocks, self.room))

    @rule(
        text=st.sampled_from(TEXTS),
        head=st.integers(0, 20),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        max_tokens=st.sampled_from((1, 2, 9, 20, 30, None)),
        min_tokens=st.sampled_from((0, 0, 3)),
        ignore_eos=st.sampled_from((True, True, False)),
        stop=st.sampled_from(((), (), (STOP,))),
        wanted=st.sampled_from((None, None, None, None, "logprobs", "states")),
        priority=st.sampled_from((0, 0, 0, -2, 3)),
        salt=st.sampled_from(("", "", "tenant")),
        tenant=st.sampled_from((("", 1.0), ("", 1.0), ("light", 0.5), ("heavy", 3.0))),
        count=st.sampled_from((1, 1, 2, 3)),
        siblings=st.booleans(),
        width=st.sampled_from((1, 1, 1, 2, 2, 3, 4)),
    )
    def add(
        self,
        text: tuple[int, ...],
        head: int,
        tail: list[int],
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        stop: tuple[int, ...],
        wanted: str | None,
        priority: int,
        salt: str,
        tenant: tuple[str, float],
        count: int,
        siblings: bool,
        width: int,
    ) -> None:
        prompt = (*text[:head], *tail) or (2,)
        if width > 1:  # whoever searches looks for endings itself
            count, wanted, ignore_eos, stop = 1, None, True, ()
            prompt, max_tokens = prompt[:7], min(max_tokens or 6, 9)  # as many must fit into the pool
        if wanted == "states":
            max_tokens = 1
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
            prompt_logprobs=0 if wanted == "logprobs" else None,
            pooling="mean" if wanted == "states" else None,
            n=width,
            use_beam_search=width > 1,
        )
        parent: Request | None = None
        for _ in range(count):
            request = Request(
                str(len(self.oracles)),
                prompt,
                params,
                eos_token_ids=frozenset({EOS}),
                priority=priority,
                cache_salt=salt,
                tenant=tenant[0],
                weight=tenant[1],
                arrival=len(self.oracles),
                arrival_time=self.now,
                parent=parent,
            )
            try:
                self.scheduler.add(request)
            except QueueFullError:
                scheduler = self.scheduler
                assert scheduler.num_waiting >= 12 or scheduler.backlog.tokens + len(prompt) > 150
                return
            except RequestError as error:
                pool = self.scheduler.blocks.capacity(self.scheduler.blocks.num_blocks, 1000)
                room = max(1, self.scheduler.config.max_model_len - len(prompt))
                assert error.param in ("prompt", "max_tokens", "n")
                if width == 1:
                    assert len(prompt) + (max_tokens or 1) - 1 > pool or (max_tokens or 1) > room
                return
            self.oracles[request.request_id] = self.live[request.request_id] = Oracle(request)
            parent = (parent or request) if siblings else None

    @precondition(lambda self: self.scheduler.num_in_flight < self.depth)
    @rule(seconds=st.sampled_from((0.0, 0.5, 3.0)))
    def schedule(self, seconds: float) -> None:
        self.now += seconds
        plan = self.scheduler.schedule(self.now, self.drafts())
        if plan is None:
            # Nothing can run only if there is nothing to run or everything waits for a commit or the disk.
            tiers = self.scheduler.blocks.tiers
            assert not self.live or self.scheduler.num_in_flight or (tiers and tiers.num_reading)
            if not self.not_run:
                self.runner.begin(self.scheduler.transfers(), self.scheduler.blocks.num_blocks)
            return
        assert 0 < plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(plan.sequences) <= self.scheduler.config.max_num_seqs
        assert all(s.request_id in self.live for s in plan.sequences), "a request runs that has ended"
        SchedulerMachine.copies += len(plan.copies)
        for window, sequence in ((w, s) for s in plan.sequences for w in self.runner.windows if w):
            self.held(window, sequence)
        planned = [self.live[s.request_id].request for s in plan.sequences]
        SchedulerMachine.mixed += any(len(r.beams) > 1 for r in planned) and len({r.tenant for r in planned}) > 1
        sampling = {s.request_id for s in plan.sequences if s.num_sampled}
        for name in sampling:
            beams = {beam.request_id for beam in self.live[name].request.beams}
            assert beams <= sampling, "a beam goes on without the others"
        SchedulerMachine.saved += sum(len(s.saves) for s in plan.sequences)
        SchedulerMachine.resumed += len(plan.state_copies)
        self.not_run.append(plan)

    def held(self, window: int, sequence: ScheduledSequence) -> None:
        """A window, the blocks at its ends, and what is in flight: no more is held."""
        blocks, request = self.scheduler.blocks, self.live[sequence.request_id].request
        begin, end = blocks.spans(sequence.request_id)[self.runner.windows.index(window)]
        flying = request.num_computed - request.num_committed
        SchedulerMachine.passed += begin > 0
        assert end - begin <= window + flying + 3 * blocks.block_size

    def drafts(self) -> dict[str, list[int]]:
        """For some of those that run, as chance has it: what comes next, as far as it is not led astray."""
        drafts: dict[str, list[int]] = {}
        if self.scheduler.blocks.states is not None:
            return drafts
        for name, oracle in self.live.items():
            request = oracle.request
            chance = crc32(f"{name} {len(request.output_token_ids)} {self.now}".encode())
            if not request.output_token_ids or chance % 3 == 0:
                continue
            known, length, wrong = request.num_prompt + len(request.output_token_ids), chance % 5, chance // 5 % 6
            oracle.upto(known + length)
            drafts[name] = oracle.tokens[known : known + length]
            if wrong < length:
                drafts[name][wrong] = (drafts[name][wrong] + 1) % VOCAB
        return drafts

    @precondition(lambda self: self.not_run)
    @rule()
    def run_oldest(self) -> None:
        """A plan may run long after it was made, but plans run in order."""
        plan = self.not_run.popleft()
        self.not_committed.append((plan, self.runner.run(plan, self.oracles)))
        if not self.not_run:
            self.runner.begin(self.scheduler.transfers(), self.scheduler.blocks.num_blocks)

    @precondition(lambda self: self.scheduler.num_in_flight)
    @rule()
    def commit(self) -> None:
        if not self.not_committed:
            self.run_oldest()
        plan, results = self.not_committed.popleft()
        lengths = {name: len(oracle.request.output_token_ids) for name, oracle in self.live.items()}
        updates = self.scheduler.commit(plan, results)
        for sequence in plan.sequences:
            if sequence.draft and sequence.request_id in lengths:
                SchedulerMachine.accepted += len(results[sequence.request_id]) - 1
                SchedulerMachine.refused += len(sequence.draft) - len(results[sequence.request_id]) + 1
        for update in updates:
            oracle = self.live[update.request_id]
            assert update.token_ids == tuple(oracle.request.output_token_ids[lengths[update.request_id] :])
            if update.finish_reason is not None:
                assert (oracle.request.output_token_ids, update.finish_reason) == oracle.outputs()
                if oracle.request.is_scored:
                    assert oracle.rows == list(range(oracle.request.num_prompt)), (
                        "each prompt row exactly once"
                    )
                del self.live[update.request_id]
        for update in updates:
            if update.request_id in self.live and self.live[update.request_id].request.beams:
                self.branch(update.request_id)

    def branch(self, name: str) -> None:
        """Drop this beam, or fork it while there is room, as chance has it."""
        request = self.live[name].request
        chance = crc32(f"{name} {len(request.output_token_ids)}".encode()) % 7
        if chance == 0 and len(request.beams) > 1:
            del self.live[name]
            assert self.scheduler.finish(name, "stop")
        elif chance > 2 and len(request.beams) < request.params.n:
            token = (request.output_token_ids[-1] + chance) % VOCAB
            child = self.scheduler.fork(name, str(len(self.oracles)), token)
            assert child.output_token_ids == [*request.output_token_ids[:-1], token]
            self.oracles[child.request_id] = self.live[child.request_id] = Oracle(child)
            SchedulerMachine.forks += 1

    @precondition(lambda self: self.live)
    @rule(rounds=st.integers(1, 12))
    def work(self, rounds: int) -> None:
        """What an engine does: keep ``depth`` plans in flight, commit the oldest."""
        for _ in range(rounds):
            if self.scheduler.num_in_flight < self.depth:
                self.schedule(0.5)
                self.consistent()
            if self.scheduler.num_in_flight:
                self.commit()
                self.consistent()
            if self.runner.begun:
                self.transfer(0, True)

    @precondition(lambda self: len(self.live) > 3)
    @rule(data=st.data(), abort=st.booleans())
    def end(self, data: st.DataObject, abort: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(name).request
        assert self.scheduler.finish(name, "abort") if abort else self.scheduler.finish(name, "stop", "END")
        assert request.is_finished and request.finish_reason == ("abort" if abort else "stop")

    @invariant()
    def consistent(self) -> None:
        SchedulerMachine.count += 1
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        blocks = self.scheduler.blocks
        held, gone = blocks.changes()
        self.told = (self.told | {*held}) - {*gone}
        assert self.told == set(blocks.watch()), "what is told of blocks is not what is there"
        assert self.scheduler._requests.keys() == self.live.keys()
        for oracle in self.live.values():
            outputs = oracle.request.output_token_ids
            oracle.upto(oracle.request.num_prompt + len(outputs))
            expected = oracle.tokens[oracle.request.num_prompt :]
            assert outputs == expected[: len(outputs)], "tokens changed"

    def teardown(self) -> None:
        """Drain: every request ends, in a bounded number of steps, and no block is lost."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100):
            if self.scheduler.has_work():
                self.work(10)
        assert not self.scheduler.has_work() and not self.live, "a request never ends"
        blocks = self.scheduler.blocks
        assert blocks.num_used == 0 and blocks.num_free == blocks.num_blocks and not blocks.tables()
        self.count_all()

    def count_all(self) -> None:
        """What a scheduler did until it ended."""
        SchedulerMachine.preemptions += self.scheduler.num_preemptions
        SchedulerMachine.hits += self.scheduler.prefix_hits
        if tiers := self.scheduler.blocks.tiers:
            SchedulerMachine.loaded += tiers.loaded
            SchedulerMachine.read += tiers.read


def drive(steps: int, *, fixed: bool) -> None:
    """Run and check at least ``steps`` operations, and more until every case was there often enough: some draws have
    little of one. ``fixed``: the same draws every time, where what is tested stays the same."""
    machine = SchedulerMachine
    machine.count = machine.preemptions = machine.hits = machine.copies = machine.forks = machine.mixed = 0
    machine.accepted = machine.refused = machine.passed = machine.loaded = machine.read = 0
    machine.saved = machine.resumed = 0
    for number in range(8):
        run_state_machine_as_test(
            seed(46 + number)(machine) if fixed else machine,  # 46 alone has enough of every case
            settings=settings(
                max_examples=steps // 100,
                stateful_step_count=100,
                derandomize=False,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if not (rare := too_rare(steps)) and machine.count >= steps:
            return
    raise AssertionError(f"{machine.count:,} steps: {', '.join(rare)}")


def too_rare(steps: int) -> list[str]:
    """The cases of which ``steps`` operations would say little."""
    machine = SchedulerMachine
    enough = {
        "the pool was never tight": machine.preemptions > steps // 200 and machine.hits > steps // 10,
        "siblings hardly shared": machine.copies > steps // 1000,
        "beams hardly forked": machine.forks > steps // 100,
        "beams hardly ran beside other tenants": machine.mixed > steps // 400,
        "drafts were hardly ever right, or wrong": min(machine.accepted, machine.refused) > steps // 50,
        "windows hardly passed a block": machine.passed > steps // 20,
        "states were hardly kept, or found": machine.saved > steps // 20 and machine.resumed > steps // 100,
        "hardly anything came back": machine.loaded > steps // 500 and machine.read > steps // 5000,
    }
    return [case for case, there in enough.items() if not there]


def test_random_steps() -> None:
    drive(3_000, fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_random_steps(pytestconfig: pytest.Config) -> None:
    """20,000, other ones each time, or 100,000 with ``--everything``."""
    drive(100_000 if pytestconfig.getoption("--everything") else 20_000, fixed=False)


def test_beams_wait_for_the_one_that_has_no_room() -> None:
    """Found at random: of two beams that were preempted, one could write its next token before a commit."""
    machine = SchedulerMachine()
    machine.start(
        positions=19, block_size=1, caching=False, max_num_seqs=2, extra_budget=11, extra_rows=0, depth=2, stages=1,
        windows=(0, 1, 9), slots=0, room=0, snapshots=1,
    )  # fmt: skip

    def add(head: int, max_tokens: int, *, tail: list[int] | None = None, count: int = 1, width: int = 2) -> None:
        machine.add(
            text=TEXTS[0], head=head, tail=tail or [], max_tokens=max_tokens, min_tokens=0, ignore_eos=True, stop=(),
            wanted=None, priority=0, salt="", tenant=("", 1.0) if head < 8 else ("heavy", 3.0), count=count,
            siblings=False, width=width,
        )  # fmt: skip

    def work(*rounds: int) -> None:
        for each in rounds:
            machine.work(each)
            machine.consistent()

    add(0, 6)
    add(0, 20, count=3, width=1)
    work(7, 11)
    add(4, 6, tail=[0, 0, 0])
    work(6)
    add(8, 2)
    work(1)
    machine.scheduler.finish("2", "abort")
    del machine.live["2"]
    work(12, 8, 4)
    while machine.live:
        for _ in range(2):
            if machine.scheduler.num_in_flight < machine.depth:
                machine.schedule(0.0)
        work(1)
