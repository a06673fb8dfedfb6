"""The fleet: runs of decode steps change nothing, nothing is lost, and one replica is the engine's own loop."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import UsageError
from qserve.evals.lengths import Lengths
from qserve.evals.simulator.cost import FittedCost, RooflineCost, shape_of
from qserve.evals.simulator.decode_run import LeapingScheduler
from qserve.evals.simulator.fleet import Fleet, FleetConfig, KvTransfer, Outcome
from qserve.evals.simulator.replica import ReplicaConfig
from qserve.evals.simulator.traffic import Arrival, Traffic, prompt_tokens
from qserve.runtime.autoscale import Autoscale
from qserve.runtime.blocks import BlockManager
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.scheduler import Scheduler

COST = FittedCost(curve=((1, 0.01), (16, 0.013), (64, 0.03)), per_row=1e-4, per_prefill_kv=1e-6, per_decode_kv=3e-6)


def config(
    seqs: int = 4, blocks: int = 64, *, budget: int = 16, caching: bool = True, waiting: int = 50
) -> ReplicaConfig:
    scheduler = SchedulerConfig(
        max_model_len=128, max_num_seqs=seqs, max_num_batched_tokens=max(budget, seqs), max_waiting=waiting
    )
    return ReplicaConfig(scheduler, blocks, 4, caching)


def facts(outcome: Outcome) -> tuple[object, ...]:
    return outcome.records, outcome.usages, outcome.seconds, outcome.scaling


def traffic(draw: random.Random, requests: int, rate: float, **more: int) -> list[Arrival]:
    lengths = Lengths(draw.choice((3, 12, 30)), draw.choice((0.0, 0.7)))
    return list(Traffic(rate, requests, lengths, Lengths(20, 0.6), max_model_len=100, seed=draw.random(), **more))  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    seqs=st.sampled_from((1, 2, 4, 8)),
    blocks=st.sampled_from((26, 40, 64, 200)),
    caching=st.booleans(),
    rate=st.sampled_from((1.0, 5.0, 20.0, 500.0)),
    burst=st.sampled_from((1, 1, 7)),
    prefixes=st.sampled_from((0, 3)),
    replicas=st.sampled_from((1, 1, 3)),
    routing=st.sampled_from(("round-robin", "least-loaded", "prefix-aware")),
    scaled=st.booleans(),
    transfer=st.sampled_from((None, None, KvTransfer(0.001), KvTransfer(0.0005, 0.2))),
)
def test_runs_of_decode_steps_at_once_change_nothing(
    seed: int, seqs: int, blocks: int, caching: bool, rate: float, burst: int, prefixes: int, replicas: int,
    routing: str, scaled: bool, transfer: KvTransfer | None,
) -> None:  # fmt: skip
    """Bit for bit: every time of every request, every integral of every replica."""
    arrivals = traffic(random.Random(seed), 60, rate, burst=burst, prefixes=prefixes, prefix_tokens=9 * (prefixes > 0))
    scale = Autoscale(replicas - 1, replicas + 2, queue=1.0, cooldown=0.5, interval=0.1) if scaled else None
    one = config(seqs, blocks, caching=caching, waiting=12)
    if transfer is not None:
        one, routing = replace(one, prefix_caching=True, offload_blocks=20), "prefix-aware"
    fleet = FleetConfig(one, replicas, routing, scale, start_delay=0.3, transfer=transfer)
    quick = Fleet(fleet, COST).run(arrivals)
    slow = Fleet(replace(fleet, replica=replace(fleet.replica, leaps=False)), COST).run(arrivals)
    assert facts(quick) == facts(slow)
    assert len(quick.records) + quick.records.rejected == len(arrivals), "a request was lost"
    assert sorted(quick.records.index) == sorted(set(quick.records.index))


def test_who_shares_a_machine_slows_the_others_while_it_computes() -> None:
    """Two requests of one step each, on two replicas that do nothing else."""
    def ends(interference: float, second: float) -> list[float]:
        arrivals = [Arrival(0.0, 8, 1), Arrival(second, 8, 1)]
        fleet = FleetConfig(config(2, 26), 2, "round-robin", interference=interference)
        records = Fleet(fleet, COST).run(arrivals).records
        return [each[1] for each in sorted(zip(records.index, records.end))]

    alone = ends(1.0, 0.0)[0]
    assert ends(1.0, 0.0) == [alone, alone]
    assert ends(1.5, 0.0) == pytest.approx([alone, 1.5 * alone])  # the first began while the other was idle
    later = 2 * alone
    assert ends(1.5, later) == pytest.approx([alone, later + alone]), "nobody computes any more"
    with pytest.raises(UsageError, match="--interference must be at least 1"):
        FleetConfig(config(2, 26), 2, interference=0.5)
    with pytest.raises(UsageError, match="--interference is between engines"):
        FleetConfig(config(2, 26), interference=1.5)


def test_the_runs_are_taken_and_the_pool_is_tight_in_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the property test is worth: both sides of it happen."""
    arrivals = traffic(random.Random(3), 60, 20.0)
    one = config(4, 26)
    fleet = FleetConfig(one)
    outcome = Fleet(fleet, COST).run(arrivals)
    assert outcome.usages[0].preemptions > 0
    runs: list[int] = []
    leap = LeapingScheduler.leap
    monkeypatch.setattr(LeapingScheduler, "leap", lambda *args: (runs.append(args[1]), leap(*args))[1])
    Fleet(fleet, COST).run(arrivals)
    assert sum(runs) > outcome.usages[0].steps / 4 and max(runs) > 5


def engine_loop(arrivals: list[Arrival], one: ReplicaConfig) -> dict[int, tuple[float, float]]:
    """What an engine does, written plainly: index -> (first token, end)."""
    scheduler = Scheduler(one.scheduler, BlockManager(one.num_blocks, one.block_size, one.prefix_caching))
    todo, now = list(enumerate(arrivals))[::-1], 0.0
    first: dict[int, float] = {}
    end: dict[int, float] = {}
    while todo or scheduler.has_work():
        if not scheduler.has_work():
            now = max(now, todo[-1][1].time)
        while todo and todo[-1][1].time <= now:
            index, arrival = todo.pop()
            params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
            tokens = prompt_tokens(arrival, index)
            scheduler.add(Request(str(index), tokens, params, arrival=index, arrival_time=arrival.time))
        plan = scheduler.schedule(now)
        assert plan is not None
        now += COST.seconds(*shape_of(plan))
        for update in scheduler.commit(plan, {s.request_id: (0,) for s in plan.sequences if s.num_sampled}):
            first.setdefault(int(update.request_id), now)
            if update.finish_reason:
                end[int(update.request_id)] = now
    scheduler.check()
    return {index: (first[index], end[index]) for index in first}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix-aware"])
def test_a_fleet_of_one_is_the_single_engine(seed: int, routing: str) -> None:
    arrivals = traffic(random.Random(seed), 50, 10.0, prefixes=2, prefix_tokens=8)
    one = config(4, 40)
    records = Fleet(FleetConfig(one, routing=routing), COST).run(arrivals).records
    assert dict(zip(records.index, zip(records.first, records.end))) == engine_loop(arrivals, one)


def test_one_request_takes_the_steps_that_it_must() -> None:
    outcome = Fleet(FleetConfig(config()), COST).run([Arrival(2.0, 20, 3)])
    chunk = COST.seconds(16, 0, 16 * 17 // 2, 0)
    last = COST.seconds(4, 1, 4 * 16 + 4 * 5 // 2, 0)
    records = outcome.records
    assert records.first[0] == pytest.approx(2.0 + chunk + last)
    assert records.end[0] == pytest.approx(records.first[0] + COST.seconds(1, 1, 0, 21) + COST.seconds(1, 1, 0, 22))
    assert outcome.usages[0].steps == 4 and outcome.usages[0].peak_blocks == 6


def test_prefix_aware_routing_finds_more_in_the_caches() -> None:
    arrivals = list(Traffic(20.0, 300, Lengths(4), Lengths(4), prefixes=12, prefix_tokens=40, max_model_len=100))
    hits = {}
    for routing in ("round-robin", "prefix-aware"):
        usages = Fleet(FleetConfig(config(8, 80), 4, routing), COST).run(arrivals).usages
        hits[routing] = sum(usage.prefix_hits for usage in usages)
    assert hits["prefix-aware"] > 1.2 * hits["round-robin"]


def test_reports_of_what_was_evicted_find_more_than_a_prediction() -> None:
    """Where the caches hold a part of the prefixes, the router that knows which sends a request there."""
    load = Traffic(20.0, 600, Lengths(4, 0.7), Lengths(12, 0.7), prefixes=30, prefix_tokens=60, max_model_len=120)
    arrivals, hits = list(load), {}
    for reports in (False, True):
        usages = Fleet(FleetConfig(config(8, 150), 3, "prefix-aware", reports=reports), COST).run(arrivals).usages
        hits[reports] = sum(usage.prefix_hits for usage in usages)
    assert hits[True] > 1.02 * hits[False]


def test_blocks_of_other_replicas_are_fetched_where_that_is_sooner() -> None:
    """Prefixes that everybody asks for are computed once, not once at each replica."""
    load = Traffic(40.0, 400, Lengths(4), Lengths(20, 0.6), prefixes=6, prefix_tokens=60, max_model_len=100)
    arrivals, found = list(load), {}
    for transfer in (None, KvTransfer(1e-4, 1e-3), KvTransfer(1.0)):
        one = replace(config(8, 80), offload_blocks=80)
        outcome = Fleet(FleetConfig(one, 4, "prefix-aware", transfer=transfer), COST).run(arrivals)
        assert len(outcome.records) == 400
        found[transfer] = sum(usage.prefix_hits for usage in outcome.usages)
    quick, slow = found[KvTransfer(1e-4, 1e-3)], found[KvTransfer(1.0)]
    assert quick > 1.01 * found[None] and slow == found[None]


def test_replicas_of_the_prefill_role_compute_the_prompts() -> None:
    arrivals = list(Traffic(5.0, 100, Lengths(80), Lengths(20), max_model_len=120))
    one = replace(config(8, 200), offload_blocks=200)
    outcome = Fleet(FleetConfig(one, 3, "prefix-aware", transfer=KvTransfer(1e-4, 1e-3, prefill=1)), COST).run(arrivals)
    assert len(outcome.records) == 100 and sorted(outcome.records.index) == list(range(100))
    first, *others = sorted(outcome.usages, key=lambda usage: usage.prefix_hits)
    assert first.prefix_queries == 100 * 80 and not first.prefix_hits
    assert sum(usage.prefix_hits for usage in others) >= 100 * 76, "all but the last block"
    assert all(output == 20 for output in outcome.records.output)


def test_more_replicas_start_when_queues_are_deep_and_end_when_it_is_calm() -> None:
    busy = list(Traffic(30.0, 300, Lengths(10), Lengths(20), max_model_len=100))
    calm = [Arrival(busy[-1].time + 200.0 + 5 * i, 10, 20) for i in range(20)]
    scale = Autoscale(1, 4, queue=2.0, cooldown=20.0, interval=1.0)
    fleet = FleetConfig(config(waiting=1000), 1, "least-loaded", scale, start_delay=3.0)
    outcome = Fleet(fleet, COST).run([*busy, *calm])
    counts = [count for _, count in outcome.scaling]
    assert counts[0] == 1 and max(counts) == 4 and counts[-1] == 1
    assert outcome.scaling[1][0] >= 3.0, "a replica takes requests before it has started"
    fixed = Fleet(FleetConfig(config(waiting=1000)), COST).run([*busy, *calm])
    assert max(outcome.records.ttft()) < max(fixed.records.ttft())
    assert len(outcome.usages) >= 4 and all(usage.died is not None for usage in outcome.usages)


def test_no_replica_runs_while_nobody_asks_and_who_asks_first_waits_for_the_start() -> None:
    arrivals = [Arrival(50.0, 10, 20), Arrival(50.5, 10, 20), Arrival(300.0, 10, 20)]
    scale = Autoscale(0, 2, cooldown=20.0, interval=1.0)
    outcome = Fleet(FleetConfig(config(), 0, autoscale=scale, start_delay=8.0), COST).run(arrivals)
    assert [count for _, count in outcome.scaling] == [0, 1, 0, 1]
    assert all(7.5 < ttft < 11.0 for ttft in outcome.records.ttft()) and len(outcome.records) == 3
    assert sum((usage.died or 0.0) - usage.born for usage in outcome.usages) < 100


def test_a_spare_replica_takes_a_burst_before_others_have_started() -> None:
    calm = list(Traffic(2.0, 100, Lengths(10), Lengths(20), max_model_len=100))
    arrivals = [*calm, *(Arrival(calm[-1].time + 0.02 * i, 10, 20) for i in range(200))]
    scale = Autoscale(1, 4, queue=2.0, cooldown=200.0, interval=1.0)
    waited = {}
    for spare in (0, 2):
        rule = replace(scale, spare_replicas=spare)
        fleet = FleetConfig(config(waiting=1000), 1, "least-loaded", rule, start_delay=30.0)
        outcome = Fleet(fleet, COST).run(arrivals)
        assert len(outcome.records) == 300 and max(count for _, count in outcome.scaling) <= 4
        waited[spare] = max(outcome.records.ttft())
    assert waited[2] < 0.5 * waited[0]


def test_a_request_that_never_fits_is_counted_and_nothing_else() -> None:
    outcome = Fleet(FleetConfig(config()), COST).run([Arrival(0.0, 500, 3), Arrival(1.0, 10, 3)])
    assert outcome.records.rejected == 1 and len(outcome.records) == 1


def test_static_batches_wait_for_their_longest() -> None:
    arrivals = [Arrival(0.0, 4, 50 if index % 4 == 0 else 5) for index in range(16)]
    cost = RooflineCost(flops=1e15, bandwidth=1e12, parameters=1e9, weights=1e10, kv=0)
    static = Fleet(FleetConfig(replace(config(4, 200), static=True)), cost).run(arrivals)
    continuous = Fleet(FleetConfig(config(4, 200)), cost).run(arrivals)
    assert len(static.records) == len(continuous.records) == 16
    assert static.usages[0].steps >= 4 * 50
    assert continuous.usages[0].steps < 0.6 * static.usages[0].steps


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FleetConfig(config(), 0), "--replicas"),
        (lambda: FleetConfig(config(), start_delay=-1.0), "--start-delay"),
        (lambda: FleetConfig(config(), transfer=KvTransfer(0.1)), "--kv-transfer needs --routing"),
        (lambda: KvTransfer(-1.0), "times of at least 0"),
        (lambda: Fleet(FleetConfig(config(), routing="random"), COST), "unknown routing 'random'"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()  # type: ignore[operator]
