from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from qserve.runtime.backlog import QueueFullError
from qserve.runtime.blocks import BlockManager
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request, Status
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.scheduler import Scheduler
from qserve.runtime.step_plan import RequestUpdate, ScheduledSequence, StepPlan

SIZE = 4
ARRIVALS = iter(range(10**9))


def scheduler(blocks: int = 32, *, caching: bool = True, **config: Any) -> Scheduler:
    limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, **config}
    return Scheduler(SchedulerConfig(**limits), BlockManager(blocks, SIZE, caching))


def request(name: str, prompt: Iterable[int], *, eos: Iterable[int] = (), **kwargs: Any) -> Request:
    names = ("priority", "cache_salt", "arrival_time", "parent", "tenant", "weight")
    fields = {k: kwargs.pop(k) for k in names if k in kwargs}
    return Request(
        name, tuple(prompt), SamplingParams(**kwargs), frozenset(eos), arrival=next(ARRIVALS), **fields
    )


def add(s: Scheduler, *args: Any, **kwargs: Any) -> Request:
    r = request(*args, **kwargs)
    s.add(r)
    s.check()
    return r


def plan_of(s: Scheduler, now: float = 0.0) -> StepPlan:
    plan = s.schedule(now)
    s.check()
    assert plan is not None
    return plan


def commit(s: Scheduler, plan: StepPlan, token: int = 50, **tokens: int) -> list[RequestUpdate]:
    """Commit with ``token`` for every sampling sequence not named."""
    results = {q.request_id: (tokens.get(q.request_id, token),) for q in plan.sequences if q.num_sampled}
    updates = s.commit(plan, results)
    s.check()
    return updates


def step(s: Scheduler, **tokens: int) -> tuple[StepPlan, list[RequestUpdate]]:
    plan = plan_of(s)
    return plan, commit(s, plan, **tokens)


def shares(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """``request_id -> (start, number of tokens)``."""
    return {q.request_id: (q.start, len(q.token_ids)) for q in plan.sequences}


def test_one_request_from_prompt_to_length() -> None:
    s = scheduler()
    r = add(s, "a", range(10, 16), max_tokens=3)
    plan = plan_of(s, now=5.0)
    expected = ScheduledSequence("a", (10, 11, 12, 13, 14, 15), 0, ((0, 1),), num_sampled=1, is_prefill=True)
    assert plan == StepPlan(0, (expected,), (), ()) and plan.num_tokens == 6
    assert r.scheduled_time == 5.0 and r.status is Status.RUNNING
    assert commit(s, plan, a=20) == [RequestUpdate("a", (20,))]
    plan, updates = step(s, a=21)
    assert plan == StepPlan(1, (ScheduledSequence("a", (20,), 6, ((0, 1),), 1, is_prefill=False),), (), ())
    assert updates == [RequestUpdate("a", (21,))]
    plan, updates = step(s, a=22)
    assert plan.sequences == (ScheduledSequence("a", (21,), 7, ((0, 1),), 1, is_prefill=False),)
    assert updates == [RequestUpdate("a", (22,), "length")]
    assert r.output_token_ids == [20, 21, 22] and r.finish_reason == "length"
    assert s.blocks.num_used == 0 and not s.has_work() and s.schedule(0.0) is None


def test_plan_is_plain_data() -> None:
    s = scheduler()
    add(s, "a", range(3), prompt_logprobs=0)
    plan = plan_of(s)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data == {
        "step": 0,
        "sequences": [
            {
                "request_id": "a",
                "token_ids": [0, 1, 2],
                "start": 0,
                "block_tables": [[0]],
                "num_sampled": 1,
                "is_prefill": True,
                "wants_prompt_logprobs": True,
                "wants_prompt_states": False,
                "adapter": -1,
                "state": -1,
                "saves": [],
            }
        ],
        "preempted": [],
        "copies": [],
        "state_copies": [],
        "num_tokens": 3,
    }


def test_prompts_are_chunked_and_decodes_come_first() -> None:
    s = scheduler(max_num_batched_tokens=8)
    add(s, "a", range(3))
    step(s)
    add(s, "b", range(100, 112))
    add(s, "c", range(200, 205))
    plan, updates = step(s)
    assert shares(plan) == {"a": (3, 1), "b": (0, 7)} and [u.request_id for u in updates] == ["a"]
    plan, updates = step(s)
    assert shares(plan) == {"a": (4, 1), "b": (7, 5), "c": (0, 2)}
    assert [(q.num_sampled, q.is_prefill) for q in plan.sequences] == [(1, False), (1, True), (0, True)]
    assert [u.request_id for u in updates] == ["a", "b"]
    assert shares(step(s)[0]) == {"a": (5, 1), "b": (12, 1), "c": (2, 3)}


def test_decodes_are_first_in_the_plan_even_of_a_lower_rank() -> None:
    s = scheduler(max_num_batched_tokens=8)
    add(s, "low", range(3), priority=5)
    step(s)
    add(s, "high", range(100, 120), priority=-5)
    for start in (0, 7, 14):
        plan, _ = step(s)
        assert list(shares(plan)) == ["low", "high"] and shares(plan)["high"][0] == start
        assert plan.num_tokens <= 8


def test_admission_is_by_priority_then_arrival_and_stops_at_max_num_seqs() -> None:
    s = scheduler(max_num_seqs=3)
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        add(s, name, [1], priority=priority)
    assert list(shares(plan_of(s))) == ["c", "b", "d"] and (s.num_running, s.num_waiting) == (3, 1)


def test_waiting_counts_like_priority() -> None:
    s = scheduler(max_num_seqs=1, priority_aging=10.0)
    add(s, "old", [1], priority=2, arrival_time=0.0)
    add(s, "young", [1], priority=0, arrival_time=21.0)
    add(s, "middle", [1], priority=0, arrival_time=19.0)
    order = []
    while s.has_work():
        plan = plan_of(s)
        order.append(plan.sequences[0].request_id)
        commit(s, plan)
        s.finish(order[-1], "stop")
    assert order == ["middle", "old", "young"]


def test_nothing_overtakes_a_request_that_does_not_fit_yet() -> None:
    s = scheduler(blocks=6, caching=False)
    add(s, "a", range(9), max_tokens=2)
    step(s)
    add(s, "big", range(14), max_tokens=2)
    add(s, "small", [1], max_tokens=2)
    assert list(shares(step(s)[0])) == ["a"]  # the last step of "a"
    assert list(shares(step(s)[0])) == ["big", "small"]


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    s = scheduler(blocks=4, caching=False)
    add(s, "a", range(8), max_tokens=2)
    add(s, "b", range(100, 108), max_tokens=2)
    assert list(shares(step(s)[0])) == ["a"]  # both would fit now, but not in the next step
    assert list(shares(step(s)[0])) == ["a"]
    assert list(shares(step(s)[0])) == ["b"] and s.num_preemptions == 0


def test_preemption_takes_the_last_in_rank_and_keeps_its_tokens() -> None:
    s = scheduler(blocks=5)
    add(s, "a", range(7), max_tokens=10)
    low = add(s, "b", range(100, 104), max_tokens=10)
    plan, _ = step(s, a=30, b=40)
    assert shares(plan) == {"a": (0, 7), "b": (0, 4)}
    step(s, a=31, b=41)
    step(s, a=32, b=42)
    step(s, a=33, b=43)
    plan, _ = step(s, a=34, b=44)
    assert plan.preempted == () and s.blocks.num_free == 0
    plan, _ = step(s, a=35)  # position 11 of "a" is its block's last, "b" needs a third block and finds none
    assert shares(plan) == {"a": (11, 1)} and plan.preempted == ("b",) and s.num_preemptions == 1
    assert low.status is Status.PREEMPTED and low.output_token_ids == [40, 41, 42, 43, 44]
    while low.status is Status.PREEMPTED:
        plan, _ = step(s)
    (resumed,) = (q for q in plan.sequences if q.request_id == "b")
    assert resumed.start + len(resumed.token_ids) == 9 and resumed.num_sampled == 1
    assert resumed.token_ids == (100, 101, 102, 103, 40, 41, 42, 43, 44)[resumed.start :]
    while s.has_work():
        step(s)
    assert low.output_token_ids[:5] == [40, 41, 42, 43, 44] and len(low.output_token_ids) == 10
    assert low.num_cached == 0, "what a resumed request finds again is not a cached prompt"


def test_a_full_prefix_hit_still_computes_the_last_prompt_token() -> None:
    s = scheduler()
    add(s, "a", range(8), max_tokens=1)
    step(s)
    hit = add(s, "b", range(8), max_tokens=1)
    plan, _ = step(s)
    assert shares(plan) == {"b": (4, 4)} and hit.num_cached == 4
    longer = add(s, "c", [*range(8), 9], max_tokens=1)
    plan, _ = step(s)
    assert shares(plan) == {"c": (8, 1)} and longer.num_cached == 8 and plan.sequences[0].is_prefill
    other = add(s, "d", [*range(8), 9], max_tokens=1, cache_salt="tenant")
    assert shares(step(s)[0]) == {"d": (0, 9)} and other.num_cached == 0
    assert (s.prefix_queries, s.prefix_hits) == (8 + 8 + 9 + 9, 4 + 8)


def test_only_committed_blocks_are_found() -> None:
    s = scheduler(max_num_batched_tokens=32)
    add(s, "a", range(8))
    first = plan_of(s)
    add(s, "b", [*range(8), 1])
    second = plan_of(s)
    assert shares(second) == {"a": (8, 1), "b": (0, 9)}
    commit(s, first)
    add(s, "c", [*range(8), 1])
    assert shares(plan_of(s))["c"] == (8, 1)
    commit(s, second)


def test_positions_in_flight_are_not_found() -> None:
    s = scheduler(max_num_batched_tokens=8)
    add(s, "a", range(16))
    first, second = plan_of(s), plan_of(s)
    commit(s, first)
    assert s.blocks.num_cached == 2
    commit(s, second)
    assert s.blocks.num_cached == 4


def test_output_blocks_are_found_by_the_next_turn() -> None:
    s = scheduler()
    add(s, "a", range(6), max_tokens=4)
    for token in (60, 61, 62, 63):
        step(s, a=token)
    add(s, "b", [*range(6), 60, 61, 62, 63, 1], max_tokens=1)
    assert shares(step(s)[0]) == {"b": (8, 3)}  # 63 was sampled but never computed


def test_prompt_logprobs_read_no_cache_and_ask_for_every_position_once() -> None:
    s = scheduler(blocks=6, max_num_batched_tokens=8)
    add(s, "warm", range(8), max_tokens=1)
    step(s)
    scored = add(s, "b", range(12), max_tokens=4, prompt_logprobs=0)
    plans = [step(s)[0] for _ in range(3)]
    assert [shares(p)["b"] for p in plans] == [(0, 8), (8, 4), (12, 1)] and scored.num_cached == 0
    assert [p.sequences[0].wants_prompt_logprobs for p in plans] == [True, True, False]


def test_prompt_logprobs_are_not_asked_for_again_after_preemption() -> None:
    s = scheduler(blocks=5, max_num_batched_tokens=6, max_num_seqs=2)
    add(s, "a", range(50, 54), max_tokens=9)
    step(s)
    b = add(s, "b", range(8), max_tokens=8, prompt_logprobs=0)
    asked: list[int] = []
    while not b.is_finished:
        plan, _ = step(s)
        for q in plan.sequences:
            if q.wants_prompt_logprobs:
                asked += range(q.start, min(q.start + len(q.token_ids), 8))
    assert asked == list(range(8)) and s.num_preemptions == 1


def test_prompt_logprobs_go_on_where_a_preemption_cut_the_prompt() -> None:
    s = scheduler(blocks=7, max_num_batched_tokens=3, max_num_seqs=2)
    add(s, "a", [1], max_tokens=13)
    step(s)
    b = add(s, "b", range(20), max_tokens=1, prompt_logprobs=0)
    asked: list[tuple[int, int, bool]] = []
    while not b.is_finished:
        plan, _ = step(s)
        asked += [
            (q.start, q.start + len(q.token_ids), q.wants_prompt_logprobs)
            for q in plan.sequences
            if q.request_id == "b"
        ]
    assert s.num_preemptions == 1
    before = [(start, start + 2, True) for start in range(0, 14, 2)]
    again = [(start, min(start + 3, 14), False) for start in range(0, 14, 3)]
    assert asked == [*before, *again, (14, 17, True), (17, 20, True)]


def test_stop_conditions_are_reported() -> None:
    s = scheduler()
    add(s, "eos", [1], eos={9})
    add(s, "halt", [1], stop_token_ids=[8])
    add(s, "length", [1], max_tokens=1)
    _, updates = step(s, eos=9, halt=8)
    assert updates == [
        RequestUpdate("eos", (9,), "stop"),
        RequestUpdate("halt", (8,), "stop", 8),
        RequestUpdate("length", (50,), "length"),
    ]
    assert not s.has_work()


@pytest.mark.parametrize(("length", "outputs"), [(62, 2), (63, 1), (64, 1)])
def test_the_context_ends_a_request(length: int, outputs: int) -> None:
    s = scheduler(max_num_batched_tokens=64)
    r = add(s, "a", range(length), max_tokens=None)
    while s.has_work():
        step(s)
    assert len(r.output_token_ids) == outputs and r.finish_reason == "length"


def test_an_open_end_is_the_end_of_the_pool_if_that_is_nearer() -> None:
    s = scheduler(blocks=3)
    r = add(s, "a", range(5), max_tokens=None)
    while s.has_work():
        step(s)
    assert r.num_tokens == 12 and r.finish_reason == "length"


@pytest.mark.parametrize(
    ("length", "max_tokens", "param", "message"),
    [
        (65, 1, "prompt", "the prompt has 65 tokens, the context 64"),
        (
            33,
            1,
            "prompt",
            "33 tokens needs 9 KV blocks of 4, the pool has 8; shorten it or raise --kv-cache-memory",
        ),
        (
            30,
            4,
            "max_tokens",
            "30 prompt and 4 output tokens need 9 KV blocks of 4, the pool has 8; ask for max_tok",
        ),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    length: int, max_tokens: int, param: str, message: str
) -> None:
    s = scheduler(blocks=8)
    with pytest.raises(RequestError) as caught:
        s.add(request("a", range(length), max_tokens=max_tokens))
    assert caught.value.param == param and message in str(caught.value)
    assert not s.has_work()


def test_the_advice_of_the_refusal_is_exact() -> None:
    s = scheduler(blocks=8)
    with pytest.raises(RequestError, match="at most 3 or"):
        s.add(request("a", range(30), max_tokens=4))
    r = add(s, "a", range(30), max_tokens=3)
    while s.has_work():
        step(s)
    assert len(r.output_token_ids) == 3


def test_full_queue_and_used_id_are_refused() -> None:
    s = scheduler(max_waiting=2)
    add(s, "a", [1])
    with pytest.raises(RequestError) as caught:
        s.add(request("a", [2]))
    assert caught.value.param == "request_id"
    add(s, "b", [1])
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        s.add(request("c", [1]))
    step(s)
    add(s, "c", [1])


@pytest.mark.parametrize(
    "config",
    [
        {"max_model_len": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 7},
        {"max_waiting": 0},
        *({"priority_aging": v} for v in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_impossible_configuration_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        scheduler(**config)


def test_placeholders_stand_for_tokens_in_flight() -> None:
    s = scheduler()
    r = add(s, "a", [1, 2], max_tokens=4)
    plans = [plan_of(s) for _ in range(4)]
    assert [q.token_ids for p in plans for q in p.sequences] == [(1, 2), (-1,), (-1,), (-1,)]
    assert [q.start for p in plans for q in p.sequences] == [0, 2, 3, 4]
    assert s.schedule(0.0) is None, "its last token is in flight"
    assert s.num_in_flight == 4
    for plan, token in zip(plans, (10, 11, 12, 13), strict=True):
        commit(s, plan, a=token)
    assert r.output_token_ids == [10, 11, 12, 13] and r.finish_reason == "length"


def test_what_a_finished_request_has_in_flight_is_discarded() -> None:
    s = scheduler()
    r = add(s, "a", [1, 2], eos={9})
    first, second = plan_of(s), plan_of(s)
    assert commit(s, first, a=9) == [RequestUpdate("a", (9,), "stop")]
    assert s.has_work(), "a plan is in flight"
    assert s.commit(second, {}) == [] and r.output_token_ids == [9] and not s.has_work()
    s.check()


def test_a_request_id_used_again_does_not_get_the_old_results() -> None:
    s = scheduler()
    old = add(s, "a", [1, 2])
    first = plan_of(s)
    assert s.finish("a", "abort") and not s.finish("a", "abort")
    new = add(s, "a", [3, 4])
    second = plan_of(s)
    assert commit(s, first, a=10) == []
    assert commit(s, second, a=20) == [RequestUpdate("a", (20,))]
    assert (old.finish_reason, old.output_token_ids, new.output_token_ids) == ("abort", [], [20])


def test_a_preempted_request_keeps_the_token_in_flight_and_waits_for_it() -> None:
    s = scheduler(blocks=4, caching=False, max_num_seqs=2)
    add(s, "a", range(4), max_tokens=8)
    b = add(s, "b", range(100, 104), max_tokens=2)
    commit(s, plan_of(s))
    plans = [plan_of(s)]
    assert shares(plans[0]) == {"a": (4, 1), "b": (4, 1)}
    plans += [plan_of(s) for _ in range(4)]
    assert plans[-1].preempted == ("b",) and b.num_plans == 1 and b.status is Status.PREEMPTED
    updates = commit(s, plans[0], b=77)
    assert updates[1] == RequestUpdate("b", (77,), "length") and b.output_token_ids == [50, 77]
    assert s.num_waiting == 0


def test_a_preempted_request_is_neither_resumed_nor_overtaken_while_it_has_a_token_in_flight() -> None:
    s = scheduler(blocks=4, max_num_seqs=3)
    add(s, "a", range(4), max_tokens=12)
    b = add(s, "b", range(100, 104), max_tokens=12)
    commit(s, plan_of(s))
    plans = [plan_of(s) for _ in range(5)]
    assert plans[-1].preempted == ("b",) and b.num_plans == 4
    add(s, "c", [1])
    s.finish("a", "abort")
    assert s.num_running == 0 and s.schedule(0.0) is None
    for token, plan in enumerate(plans, 60):
        commit(s, plan, b=token)
    plan, _ = step(s, b=64)
    assert shares(plan) == {"b": (4, 5)}
    assert plan.sequences[0].token_ids == (50, 60, 61, 62, 63), "the committed block is found again"


def test_commits_out_of_order_or_incomplete_change_nothing() -> None:
    s = scheduler()
    r = add(s, "a", [1, 2])
    first, second = plan_of(s), plan_of(s)
    with pytest.raises(ValueError, match="cannot commit plan 1: plan 0 is the oldest in flight"):
        s.commit(second, {"a": (1,)})
    with pytest.raises(ValueError, match="plan 0 has no result for a"):
        s.commit(first, {})
    s.check()
    assert r.output_token_ids == []
    commit(s, first)
    commit(s, second)
    with pytest.raises(ValueError, match="cannot commit plan 1: no plan is in flight"):
        s.commit(second, {"a": (1,)})


def test_the_engine_ends_a_request_for_its_own_reason() -> None:
    s = scheduler()
    r = add(s, "a", [1, 2])
    step(s)
    assert s.finish("a", "stop", "END") and not s.finish("a", "stop", "END")
    s.check()
    assert (r.status, r.finish_reason, r.stop_reason) == (Status.FINISHED, "stop", "END")
    assert s.blocks.num_used == 0


def test_abort_while_waiting_running_and_preempted() -> None:
    s = scheduler(blocks=4, caching=False, max_num_seqs=2)
    add(s, "a", range(4), max_tokens=13)
    b = add(s, "b", range(100, 104), max_tokens=13)
    add(s, "c", [1])
    assert s.finish("c", "abort")
    while b.status is not Status.PREEMPTED:
        step(s)
    assert s.finish("b", "abort") and s.finish("a", "abort")
    s.check()
    assert not s.has_work() and s.blocks.num_free == 4


def test_a_sibling_waits_for_the_prompt_and_shares_it_by_copy_on_write() -> None:
    s = scheduler(max_num_batched_tokens=8, caching=False)
    parent = add(s, "p", range(10), max_tokens=4)
    children = [add(s, f"c{i}", range(10), max_tokens=4, parent=parent) for i in range(2)]
    add(s, "other", [1], max_tokens=4)
    assert shares(step(s)[0]) == {"p": (0, 8)}
    assert shares(step(s)[0]) == {"p": (8, 2), "other": (0, 1)}
    plan, _ = step(s)
    assert shares(plan) == {"p": (10, 1), "other": (1, 1), "c0": (9, 1), "c1": (9, 1)}
    tables = {q.request_id: q.block_tables[0] for q in plan.sequences}
    assert tables["c0"][:2] == tables["c1"][:2] == tables["p"][:2]
    assert plan.copies == ((tables["p"][2], tables["c0"][2]), (tables["p"][2], tables["c1"][2]))
    assert len({tables[name][2] for name in ("p", "c0", "c1")}) == 3
    assert [c.num_cached for c in children] == [9, 9] and children[0].parent is None
    while s.has_work():
        step(s)
    assert s.blocks.num_used == 0


def test_siblings_of_a_scored_prompt_wait_for_the_whole_of_it_and_score_nothing() -> None:
    s = scheduler(max_num_batched_tokens=8, caching=False)
    parent = add(s, "p", range(9), max_tokens=4, prompt_logprobs=0)
    child = add(s, "c", range(9), max_tokens=4, parent=parent, prompt_logprobs=0)
    assert shares(step(s)[0]) == {"p": (0, 8)}
    assert shares(step(s)[0]) == {"p": (8, 1)}, "its rows are known before the child says anything"
    plan, _ = step(s)
    assert shares(plan) == {"p": (9, 1), "c": (8, 1)}
    assert (parent.is_scored, child.is_scored, plan.sequences[1].wants_prompt_logprobs) == (True, False, False)


def test_a_sibling_of_a_one_token_prompt_runs() -> None:
    s = scheduler()
    parent = add(s, "p", [1])
    add(s, "c", [1], parent=parent)
    assert shares(step(s)[0]) == {"p": (0, 1)}
    assert shares(step(s)[0]) == {"p": (1, 1), "c": (0, 1)}


def test_a_sibling_whose_parent_ended_runs_alone() -> None:
    s = scheduler()
    parent = add(s, "p", range(5), max_tokens=1)
    child = add(s, "c", range(5), max_tokens=1, parent=parent)
    step(s)
    assert parent.is_finished
    assert shares(step(s)[0]) == {"c": (4, 1)} and child.num_cached == 4  # found in the prefix cache
    with pytest.raises(RequestError, match="parent x was not added"):
        s.add(request("d", [1], parent=request("x", [1])))


def test_no_starvation_under_a_stream_of_better_priority() -> None:
    """Brute force: every step two urgent requests arrive, twice what the engine can serve."""

    def steps_until_served(aging: float) -> int:
        s = scheduler(blocks=16, max_num_seqs=2, max_waiting=10**6, priority_aging=aging)
        victim = add(s, "victim", range(8), priority=10, max_tokens=4, arrival_time=0.0)
        for now in range(3000):
            for i in range(2):
                s.add(request(f"{now}-{i}", range(4), priority=0, max_tokens=2, arrival_time=float(now)))
            plan = s.schedule(float(now))
            assert plan is not None
            s.commit(plan, {q.request_id: (50,) for q in plan.sequences if q.num_sampled})
            if victim.is_finished:
                s.check()
                return now
        raise AssertionError("starved")

    served = [steps_until_served(aging) for aging in (1.0, 5.0, 20.0)]
    # Urgent requests that arrive within 10 levels * aging seconds go first: two a step, one served per step.
    assert [10 * a < n < 25 * a + 20 for a, n in zip((1, 5, 20), served, strict=True)] == [True] * 3


def test_a_long_decode_is_never_preempted_by_younger_requests() -> None:
    s = scheduler(blocks=16, max_num_seqs=4, caching=False)
    oldest = add(s, "oldest", range(4), max_tokens=60, priority=0)
    for now in range(59):
        s.add(request(f"{now}", range(9), max_tokens=20, arrival_time=float(now)))
        plan, _ = step(s)
        assert "oldest" in shares(plan)
    assert len(oldest.output_token_ids) == 59 and s.num_preemptions > 0


def test_decodes_are_divided_between_the_stages_of_a_pipeline() -> None:
    s = scheduler(num_stages=3)
    for name in "abcdefg":
        add(s, name, range(2), max_tokens=40)
    step(s)
    flying = [plan_of(s) for _ in range(3)]
    assert [len(plan.sequences) for plan in flying] == [3, 2, 2]
    assert s.schedule(0.0) is None, "all newest tokens are in flight"
    s.finish(flying[1].sequences[0].request_id, "abort")
    s.finish(flying[2].sequences[0].request_id, "abort")
    left = Counter[str]()
    for _ in range(30):  # the five that are left are divided anew, and nobody waits for long
        commit(s, flying.pop(0))
        flying.append(plan_of(s))
        ran = {q.request_id for plan in flying for q in plan.sequences}
        for request_id in s.request_ids():
            left[request_id] = 0 if request_id in ran else left[request_id] + 1
        assert max(left.values()) < 3
    assert sorted(len(plan.sequences) for plan in flying) == [1, 2, 2]


def test_the_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    s = scheduler(num_stages=2)
    add(s, "a", range(40), max_tokens=2)
    flying = [plan_of(s), plan_of(s)]
    assert [shares(plan) for plan in flying] == [{"a": (0, 16)}, {"a": (16, 16)}]
    commit(s, flying.pop(0))
    flying.append(plan_of(s))
    assert shares(flying[1]) == {"a": (32, 8)} and s.schedule(0.0) is None
    commit(s, flying.pop(0))
    assert s.schedule(0.0) is None, "its newest token is in flight"
    commit(s, flying.pop(0))
    assert shares(plan_of(s)) == {"a": (40, 1)}


def test_a_beam_forks_in_mid_sequence() -> None:
    s = scheduler()
    add(s, "a", range(6), max_tokens=9, n=3, use_beam_search=True)
    s.commit(plan_of(s), {"a": (20,)})
    child = s.fork("a", "b", 30)
    s.check()
    assert child.output_token_ids == [30] and s.blocks.table("b") == s.blocks.table("a")
    plan = plan_of(s)
    assert {(q.request_id, q.token_ids, q.start) for q in plan.sequences} == {("a", (20,), 6), ("b", (30,), 6)}
    assert len(plan.copies) == 1, "the block that both write into is copied once"
    assert s.schedule(0.0) is None, "beams wait for a choice"
    for wrong in (lambda: s.fork("a", "c", 1), lambda: s.fork("a", "b", 1)):
        with pytest.raises(ValueError):
            wrong()
    s.commit(plan, {"a": (21,), "b": (31,)})
    s.finish("a", "stop")
    assert [q.token_ids for q in plan_of(s).sequences] == [(31,)]
    s.check()
    s.finish("b", "abort")
    assert s.blocks.num_used == 0
