"""Tenants: which goes next, which gives way, and how an overload of one affects the others."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import merge
from itertools import count

import pytest

from qserve.runtime.backlog import QueueFullError
from qserve.runtime.blocks import BlockManager
from qserve.runtime.fairness import OUTPUT_COST, REMEMBERED, FairShares
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request, Status
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.scheduler import AHEAD_TOKENS, SHORT_PROMPT, Scheduler
from qserve.runtime.step_plan import StepPlan

ARRIVALS = count()


def make(blocks: int = 64, **limits: int) -> Scheduler:
    config = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 16, **limits}
    return Scheduler(SchedulerConfig(**config), BlockManager(blocks, 4, False))


def add(
    s: Scheduler,
    tenant: str,
    prompt: int,
    outputs: int = 1,
    *,
    priority: int = 0,
    weight: float = 1.0,
    now: float = 0.0,
) -> Request:
    number = next(ARRIVALS)
    params = SamplingParams(max_tokens=outputs, ignore_eos=True)
    request = Request(
        f"{tenant}{number}",
        tuple([1] * prompt),
        params,
        tenant=tenant,
        weight=weight,
        priority=priority,
        arrival=number,
        arrival_time=now,
    )
    s.add(request)
    s.check()
    return request


def step(s: Scheduler, now: float = 0.0) -> StepPlan | None:
    plan = s.schedule(now)
    s.check()
    if plan is not None:
        s.commit(plan, {q.request_id: (5,) for q in plan.sequences if q.num_sampled})
        s.check()
    return plan


def served(plans: Iterator[StepPlan]) -> dict[str, float]:
    """Service by tenant, as the counters count it."""
    tokens: dict[str, float] = defaultdict(float)
    for plan in plans:
        for q in plan.sequences:
            tokens[q.request_id[0]] += (len(q.token_ids) if q.is_prefill else 0) + OUTPUT_COST * q.num_sampled
    return tokens


def run(s: Scheduler, steps: int) -> Iterator[StepPlan]:
    for _ in range(steps):
        plan = step(s)
        assert plan is not None
        yield plan


def test_counters_lift_newcomers_and_forget_when_all_have_left() -> None:
    shares = FairShares(credit=3.0)
    shares.join("a")
    shares.charge("a", 10, 5, 2.0)
    assert shares.score("a", 0) == 10.0
    shares.join("b")
    assert shares.score("b", 0) == 7.0, "what it did not use is gone but for its credit"
    shares.charge("b", 4, 0, 1.0)
    shares.leave("a")
    shares.charge("b", 100, 0, 1.0)
    shares.join("a")
    assert (shares.score("a", 0), shares.score("b", 0)) == (108.0, 111.0)
    shares.leave("a")
    shares.join("a")
    assert shares.score("a", 0) == 108.0, "there is no new credit for the same idleness"
    assert shares.score("a", -1) < shares.score("b", 0)
    for tenant in ("a", "b"):
        shares.leave(tenant)
    shares.join("c")
    assert shares.score("c", 0) == 0.0


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_two_backlogged_tenants_are_served_by_weight(weight: float) -> None:
    """One asks for short answers to long prompts, the other for long answers: their tokens weigh the same."""
    s = make(blocks=400, max_waiting_tokens=100_000)
    for _ in range(120):
        add(s, "a", prompt=60, outputs=2)
        add(s, "b", prompt=2, outputs=40, weight=weight)
    tokens = served(run(s, 300))
    assert tokens["b"] / tokens["a"] == pytest.approx(weight, rel=0.2)


def test_a_long_prompt_does_not_hold_up_another_tenant() -> None:
    s = make()
    add(s, "a", prompt=100)
    add(s, "a", prompt=100)
    step(s)
    b = add(s, "b", prompt=6)
    plan = step(s)
    assert plan is not None
    assert [(q.request_id[0], len(q.token_ids)) for q in plan.sequences] == [("b", 6), ("a", 10)]
    assert b.is_finished


def test_a_tenant_without_a_place_takes_one_from_whom_has_most() -> None:
    s = make(max_num_seqs=4)
    heavy = [add(s, "a", prompt=3, outputs=50, now=float(i)) for i in range(6)]
    for _ in range(3):
        step(s)
    late = [add(s, "b", prompt=3, outputs=50, now=10.0) for _ in range(4)]
    plans = [plan for _ in range(4) if (plan := step(s))]
    assert plans[0].preempted and "b" in {q.request_id[0] for q in plans[0].sequences}
    assert sorted(q.request_id[0] for q in plans[-1].sequences) == ["a", "a", "b", "b"]
    assert heavy[0].status is Status.RUNNING, "the first in rank keeps its place"
    for _ in range(500):
        step(s)
    assert all(request.is_finished for request in heavy + late)


def test_a_decode_takes_a_block_from_the_tenant_that_was_served_most() -> None:
    s = make(blocks=6)
    first = add(s, "a", prompt=4, outputs=16)
    greedy = add(s, "b", prompt=4, outputs=16)
    while greedy.status is not Status.PREEMPTED:
        s._shares.charge("b", 100, 0, 1.0)
        assert step(s) is not None
    assert first.status is Status.RUNNING


def test_priority_between_tenants_delays_and_does_not_starve() -> None:
    s = make(max_num_seqs=1)
    low = add(s, "low", prompt=4, priority=3)
    for number in range(2000):
        if low.is_finished:
            break
        add(s, "high", prompt=20, outputs=1)
        step(s, float(number))
        step(s, float(number))
    assert low.is_finished and number > 50


def test_who_was_served_more_keeps_its_steps_short_for_who_was_served_less() -> None:
    s = make(blocks=2048, max_model_len=1024, max_num_batched_tokens=512)

    def planned() -> list[tuple[str, int]]:
        plan = step(s)
        assert plan is not None
        return [(q.request_id[0], len(q.token_ids)) for q in plan.sequences]

    add(s, "a", 400, 2)
    assert planned() == [("a", 400)], "alone it may fill a step"
    long = add(s, "a", 600, 100)
    add(s, "b", 10)
    assert planned() == [("b", 10), ("a", AHEAD_TOKENS - 10)], "nor do decodes of a lengthen the step of b's prompt"
    assert planned() == [("a", 1), ("a", AHEAD_TOKENS)], "b has gone and is expected back"
    while not long.output_token_ids:
        planned()
    add(s, "b", SHORT_PROMPT + 1)
    assert planned() == [("a", 1), ("b", SHORT_PROMPT + 1)], "a long prompt takes its time anyway"


def test_priority_counts_for_who_is_ahead() -> None:
    shares = FairShares(credit=10)
    shares.join("urgent", -1)
    shares.join("other")
    shares.charge("urgent", 500, 0, 1.0)
    assert not shares.is_ahead("urgent") and shares.is_ahead("other")
    shares.charge("urgent", 600, 0, 1.0)
    assert shares.is_ahead("urgent")


def test_who_does_not_come_back_is_forgotten() -> None:
    shares = FairShares(credit=10)
    shares.join("a")
    shares.join("b")
    shares.charge("a", 5, 0, 1.0)
    assert shares.is_ahead("a") and not shares.is_ahead("b")
    shares.leave("b")
    assert shares.is_ahead("a")
    shares.charge("a", 10 * REMEMBERED, 0, 1.0)
    assert not shares.is_ahead("a")
    shares.check(Counter("a"), Counter())


def test_the_queue_is_bounded_in_tokens_but_takes_one_request_of_any_length() -> None:
    s = make(max_waiting_tokens=20)
    add(s, "a", prompt=100)
    with pytest.raises(QueueFullError, match="1 requests are waiting with 100 prompt tokens"):
        add(s, "a", prompt=1)
    step(s)
    add(s, "a", prompt=12)
    add(s, "a", prompt=8)
    assert s.backlog.tokens == 20 and not s.backlog.has_room("a", 1, 1)
    assert s.backlog.has_room("b", 1, 10) and not s.backlog.has_room("b", 1, 11), "another has its part of the queue"
    with pytest.raises(RequestError, match="weight"):
        add(s, "a", prompt=1, weight=0.0)


def arrivals(tenant: str, rate: float, seconds: float) -> Iterator[tuple[float, str, int, int]]:
    """A Poisson process of requests: (time, tenant, prompt tokens, output tokens)."""
    draw, now = random.Random(tenant), 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        yield now, tenant, draw.randint(100, 400), draw.randint(10, 60)


def ttft_p95(rates: dict[str, float], tenant: str, seconds: float = 120.0) -> float:
    """Simulate a server that takes 10 ms per step, 1 ms per prompt token and 2 ms per decode."""
    config = SchedulerConfig(max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=128, max_waiting=200)
    s = Scheduler(config, BlockManager(1200, 4, False))
    todo = list(merge(*(arrivals(name, rate, seconds) for name, rate in rates.items())))[::-1]
    now, live, first = 0.0, {}, {}
    while todo or s.has_work():
        while todo and (todo[-1][0] <= now or not s.has_work()):
            at, name, prompt, outputs = todo.pop()
            now = max(now, at)
            number = next(ARRIVALS)
            params = SamplingParams(max_tokens=outputs, ignore_eos=True)
            request = Request(
                f"{name}{number}", tuple([1] * prompt), params, tenant=name, arrival=number, arrival_time=at
            )
            try:
                s.add(request)
                live[request.request_id] = request
            except QueueFullError:
                assert name != tenant
        if now >= seconds:
            break
        plan = s.schedule(now)
        assert plan is not None
        now += 0.01 + sum(0.001 * len(q.token_ids) if q.is_prefill else 0.002 for q in plan.sequences)
        for update in s.commit(plan, {q.request_id: (5,) for q in plan.sequences if q.num_sampled}):
            request = live[update.request_id]
            if request.tenant == tenant and update.request_id not in first:
                first[update.request_id] = now - request.arrival_time
    values = sorted(first.values())
    assert len(values) > 20
    return values[int(0.95 * len(values))]


def test_ten_times_the_load_of_one_tenant_at_most_doubles_the_wait_of_another() -> None:
    alone = ttft_p95({"light": 0.4}, "light")
    beside = ttft_p95({"light": 0.4, "heavy": 4.0}, "light")
    print(f"p95 TTFT {alone:.3f} s alone, {beside:.3f} s beside ten times the load")
    assert beside <= 2 * alone
