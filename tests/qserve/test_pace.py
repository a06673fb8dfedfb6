"""The recipe of the demo: a pure function of what was measured."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qserve.checkpoint.errors import UsageError
from qserve.pace import LADDER, LIMIT, Pace, Recipe, choose, ladder

SECONDS = st.floats(0.0, 1e4)
MEASURED = st.floats(1e-3, 1e4)
PACES = st.builds(Pace, SECONDS, SECONDS, st.floats(0.0, 1.0), st.floats(0.0, 10.0), SECONDS)
QUICK = Pace(quantize=20.0, sample=1.0, fast=0.5, token=0.004, rest=15.0)


@given(PACES, st.floats(1.0, 1e4))
def test_what_is_chosen_ends_in_time_or_is_the_smallest(pace: Pace, limit: float) -> None:
    chosen = choose(pace, limit=limit)
    assert chosen == choose(pace, limit=limit)
    fitting = [recipe for recipe in LADDER if pace.seconds(recipe) <= limit]
    assert chosen == (fitting[0] if fitting else LADDER[-1])


@given(PACES, st.sampled_from([item.name for item in fields(Pace)]), st.floats(1.0, 100.0))
def test_a_slower_machine_never_gets_a_larger_recipe(pace: Pace, what: str, factor: float) -> None:
    slower = replace(pace, **{what: getattr(pace, what) * factor})
    assert LADDER.index(choose(slower)) >= LADDER.index(choose(pace))


def test_each_rung_takes_less_than_the_one_before() -> None:
    seconds = [QUICK.seconds(recipe) for recipe in LADDER]
    assert seconds == sorted(set(seconds), reverse=True)


def test_the_machines_that_it_is_meant_for() -> None:
    slow = Pace(*(2.2 * getattr(QUICK, name) for name in ("quantize", "sample")), 0.5, 2.2 * QUICK.token, 33.0)
    assert choose(replace(QUICK, sample=0.2)) == LADDER[0]
    assert choose(QUICK) == Recipe(48, "normal", 4096)
    assert choose(slow) == Recipe(12, "normal", 4096)
    assert choose(replace(slow, rest=1000.0)) == LADDER[-1]
    assert all(pace.seconds(choose(pace)) <= LIMIT for pace in (QUICK, slow))


@given(MEASURED, MEASURED, MEASURED)
def test_what_is_measured_on_a_busy_machine_makes_sense_all_the_same(few: float, more: float, fast: float) -> None:
    pace = Pace.of((4, few), (16, more), fast, 0.01, 5.0)
    assert pace.sample >= 0 and pace.quantize >= -1e-9 and 0 <= pace.fast <= 1
    assert pace.quantizing(16, "normal") == pytest.approx(more)
    assert pace.quantizing(48, "normal") >= pace.quantizing(16, "normal") - 1e-9


def test_what_is_measured_twice_is_a_line_through_both() -> None:
    pace = Pace.of((4, 24.0), (16, 36.0), 18.0, 0.01, 5.0)
    assert (pace.quantize, pace.sample, pace.fast) == pytest.approx((20.0, 1.0, 0.5))
    assert pace.seconds(Recipe(32, "fast", 1000)) == pytest.approx(5 + 26 + 10)


def test_what_is_given_is_kept_on_every_rung() -> None:
    assert ladder() == LADDER
    assert set(ladder(48, "normal", 4096)) == {Recipe(48, "normal", 4096)}
    assert {recipe.tokens for recipe in ladder(tokens=600)} == {600}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [((0, "fast", 512), "--samples must be"), ((1, "best", 512), "--effort"), ((1, "fast", 511), "--tokens must be")],
)
def test_what_cannot_be_is_refused(recipe: tuple[int, str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Recipe(*recipe)
