"""Traffic: the same for a seed, as asked for on average, and from traces that are checked."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from qserve.checkpoint.errors import DataError, UsageError
from qserve.evals.lengths import Lengths
from qserve.evals.simulator.traffic import Arrival, Traffic, prompt_tokens, read_trace


def test_the_same_seed_gives_the_same_traffic() -> None:
    traffic = [list(Traffic(3.0, 200, Lengths(50, 0.5), Lengths(20, 1.0), seed=seed)) for seed in (1, 1, 2)]
    assert traffic[0] == traffic[1] != traffic[2]


def test_rates_and_lengths_are_those_asked_for() -> None:
    found = list(Traffic(4.0, 20_000, Lengths(100, 0.8), Lengths(30), burst=5, max_model_len=10_000))
    assert found[-1].time == pytest.approx(5000, rel=0.05)
    assert statistics.median(each.prompt for each in found) == pytest.approx(100, rel=0.05)
    assert {each.output for each in found} == {30}
    assert len({each.time for each in found}) == 4000
    assert all(each.prompt + each.output <= 10_000 for each in found)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    a, b, c = (prompt_tokens(Arrival(0.0, 10, 1, prefix, 6), index) for index, prefix in ((0, 1), (1, 1), (2, 2)))
    assert a[:6] == b[:6] and not set(a[6:]) & set(b) and not set(c) & (set(a) | set(b))
    assert len(a) == 10


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    lines = [
        {"arrival": 1005.5, "prompt": 30, "output": 4, "prefix": "b", "prefix_tokens": 20},
        {"arrival": 1000, "prompt": 10, "output": 2},
        {"arrival": 1002, "prompt": 30, "output": 4, "prefix": "b", "prefix_tokens": 20},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_trace(path) == [Arrival(0.0, 10, 2), Arrival(2.0, 30, 4, 1, 20), Arrival(5.5, 30, 4, 1, 20)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not an object"),
        ("[1]", "not an object"),
        ('{"arrival": 0, "prompt": 1}', "not an object"),
        ('{"arrival": NaN, "prompt": 1, "output": 1}', "arrival"),
        ('{"arrival": 0, "prompt": 0, "output": 1}', "prompt must be"),
        ('{"arrival": 0, "prompt": 1, "output": true}', "output must be"),
        ('{"arrival": 0, "prompt": 5, "output": 1, "prefix": "a", "prefix_tokens": 5}', "prefix_tokens"),
        ('{"arrival": 0, "prompt": 5, "output": 1, "time": 5}', "unknown field 'time'"),
        ("", "holds no request"),
    ],
)
def test_a_bad_trace_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(DataError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "lognormal:5", "lognormal:5:-1", "lognormal:5:nan", "normal:5:1", "99999999"]
)
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt must be"):
        Lengths.parse(text, "--prompt")
