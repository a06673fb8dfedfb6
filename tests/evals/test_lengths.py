"""Lengths: drawn as asked for, with the moments that they say, and refused where they are none."""

from __future__ import annotations

import random
import statistics

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.evals.lengths import Lengths


def test_lengths_are_even_between_the_least_and_the_most() -> None:
    lengths = Lengths.parse("uniform:128:4096", "--prompt")
    draw = random.Random(0)
    found = [lengths.draw(draw, 10_000) for _ in range(20_000)]
    assert 128 <= min(found) < 140 and 4080 < max(found) <= 4096 == lengths.longest
    assert statistics.mean(found) == pytest.approx(2112, rel=0.02) and lengths.mean == 2112
    quarters = statistics.quantiles(found)
    assert quarters == pytest.approx([1120, 2112, 3104], rel=0.03)
    assert lengths.draw(draw, 100) == 100


@pytest.mark.parametrize("text", ["200", "10/50/200", "lognormal:90:0.6", "uniform:5:50", "uniform:7:7"])
def test_the_mean_of_lengths_is_that_of_what_is_drawn(text: str) -> None:
    lengths, draw = Lengths.parse(text, "--prompt"), random.Random(1)
    found = [lengths.draw(draw, 10**6) for _ in range(20_000)]
    assert statistics.mean(found) == pytest.approx(lengths.mean, rel=0.03)
    assert statistics.mean(each**2 for each in found) == pytest.approx(lengths.mean_square, rel=0.06)
    assert statistics.mean(lengths.spread(64)) == pytest.approx(lengths.mean, rel=0.03)
    assert Lengths.parse(str(lengths), "--prompt") == lengths


@pytest.mark.parametrize(
    "text", ["uniform:9:8", "uniform:0:5", "uniform:1", "uniform:1:2:3", "uniform:a:b", "uniform:1:99999999", "1//2"]
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt"):
        Lengths.parse(text, "--prompt")
