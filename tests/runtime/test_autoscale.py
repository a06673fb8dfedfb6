"""The rule of the autoscaler, and that it neither flaps nor leaves its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qserve.checkpoint.errors import UsageError
from qserve.runtime.autoscale import Autoscale, Autoscaler, Load, needed

RULE = Autoscale(0, 10, queue=4.0, ttft=2.0, target_ongoing_requests=16)
IDLE = Load(ready=1, starting=0, ongoing=0, waiting=0, begun=0)


@pytest.mark.parametrize(
    ("load", "rate", "capacity", "count"),
    [
        (IDLE, 0.0, 0.0, 0),
        (replace(IDLE, ongoing=1), 0.0, 0.0, 1),
        (replace(IDLE, ongoing=17), 0.0, 0.0, 2),
        (replace(IDLE, ongoing=10, waiting=4), 0.0, 0.0, 1),
        (replace(IDLE, ongoing=10, waiting=5), 0.0, 0.0, 2),  # the queue is too deep
        (replace(IDLE, starting=1, ongoing=10, waiting=5), 0.0, 0.0, 1),  # one that starts is on its way already
        (replace(IDLE, ready=4, ongoing=20, waiting=12), 4.0, 0.0, 6),  # 3 s of queue, 2 are allowed
        (replace(IDLE, ready=2, ongoing=3), 9.0, 3.0, 4),  # 9 a second where one does 3, with headroom
        (replace(IDLE, ready=2, ongoing=300), 0.0, 0.0, 4),  # twice at most
        (replace(IDLE, ready=9, ongoing=300), 0.0, 0.0, 10),
        (Load(0, 0, 3, 3, 0), 0.0, 0.0, 1),  # from zero
    ],
)
def test_what_a_load_needs(load: Load, rate: float, capacity: float, count: int) -> None:
    assert needed(load, rate, capacity, RULE) == count


@pytest.mark.parametrize(
    ("load", "count"),
    [
        (replace(IDLE, ready=0), 0),  # a model that nobody asks has none
        (replace(IDLE, ongoing=1), 3),
        (replace(IDLE, ready=2, ongoing=300), 6),
        (replace(IDLE, ready=9, ongoing=300), 10),
    ],
)
def test_spare_replicas_are_beyond_those_that_are_needed(load: Load, count: int) -> None:
    assert needed(load, 0.0, 0.0, replace(RULE, spare_replicas=2)) == count


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 400), st.integers(0, 400))),
    st.integers(0, 3),
    st.integers(3, 10),
)
def test_it_stays_within_its_limits_and_keeps_what_was_needed(
    loads: list[tuple[int, int, int, int]], least: int, most: int
) -> None:
    rule = Autoscale(least, most, ttft=1.0, cooldown=30.0)
    scaler, begun, decided = Autoscaler(rule), 0, list[int]()
    for second, (ready, starting, ongoing, new) in enumerate(loads):
        begun += new
        load = Load(ready, starting, ongoing, ongoing // 2, begun)
        decided.append(scaler.decide(5.0 * second, load))
        assert least <= decided[-1] <= most
        assert decided[-1] >= needed(load, 0.0, 0.0, rule)
        assert decided[-1] >= least and len(scaler._needs) <= 8


def test_replicas_go_when_the_cooldown_is_over_and_not_before() -> None:
    scaler = Autoscaler(Autoscale(1, 4, cooldown=60.0))
    busy, calm = Load(1, 0, 30, 20, 0), Load(2, 0, 1, 0, 0)
    assert scaler.decide(0.0, busy) == 2
    assert [scaler.decide(time, calm) for time in (5.0, 30.0, 60.0, 61.0)] == [2, 2, 2, 1]


def test_a_rate_that_needed_two_keeps_two() -> None:
    """Without what was measured, the calm that a second replica brings would end it, and the queue would come back."""
    scaler, begun = Autoscaler(Autoscale(1, 4, cooldown=30.0)), 0
    for second in range(40):
        begun += 2
        count = scaler.decide(float(second), Load(1, 0, 30, 20, begun))
    assert count >= 2
    for second in range(40, 200):
        begun += 2
        count = scaler.decide(float(second), Load(2, 0, 4, 0, begun))
    assert count == 2, "2 a second is all that one can do"
    for second in range(200, 300):
        begun += second % 2
        count = scaler.decide(float(second), Load(2, 0, 1, 0, begun))
    assert count == 1


@pytest.mark.parametrize(
    "rule", [
        {"max_replicas": 0}, {"min_replicas": 2}, {"interval": 0.0}, {"cooldown": -1.0}, {"ttft": 0.0},
        {"spare_replicas": -1},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Autoscale(**rule)  # type: ignore[arg-type]
