"""What continuous batching gains, counted in steps of the real scheduler: nothing here depends on a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import open_model
from qserve.evals.bench.batching import STATIC_BATCHES, batching_report, compare, lengths_of
from qserve.evals.lengths import Lengths
from qserve.evals.page import page
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.runner import StepOutput
from tests.tiny_model import save_tiny_model


class Nothing:
    """A runner that computes nothing: every token is the same."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.zeros(64, vocab_size)
        self._greedy = torch.full((64,), 7, dtype=torch.int32)

    def run(self, plan: Any, prompt_sink: Any) -> StepOutput:
        ids = tuple(sequence.request_id for sequence in plan.sequences if sequence.num_sampled)
        return StepOutput(ids, self._logits[: len(ids)], self._greedy[: len(ids)])


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, max_waiting=4096, threads=1)
    engine = Engine(open_model(tiny_model), config)
    engine.runner = Nothing(engine.vocab_size)
    return engine


# A tenth of 10/50/200/500 and of a mix with mean 200 and longest 800: the same bounds.
@pytest.mark.parametrize(
    ("mix", "bound", "least"),
    [("1/5/20/50", 500 / 190, 2.3), ("2/5/7/10/10/16/30/80", 4.0, 3.5)],
)
def test_the_gain_in_steps_at_batch_64(engine: Engine, mix: str, bound: float, least: float) -> None:
    lengths = lengths_of(Lengths.parse(mix, "--output"), 64 * 24, 64, 0)
    found = compare(engine, range(300), 2, lengths)
    assert found.bound == pytest.approx(bound)
    assert least <= found.gain_in_steps <= bound
    assert found.static.steps == STATIC_BATCHES * max(lengths), "each is as long as its longest"
    # Blocks of 16 are coarse for so short ones.
    assert found.continuous.written < found.continuous.paged <= found.continuous.contiguous


@pytest.mark.slow
@pytest.mark.parametrize(("mix", "least"), [("10/50/200/500", 2.3), ("20/50/70/100/100/160/300/800", 3.5)])
def test_the_gain_at_full_length(tiny_model: Path, mix: str, least: float) -> None:
    config = EngineConfig(max_num_seqs=64, max_waiting=4096, max_model_len=1024, kv_cache_memory=256 << 20, threads=1)
    engine = Engine(str(save_tiny_model(tiny_model.parent / "long", context=1024)), config)
    engine.runner = Nothing(engine.vocab_size)
    found = compare(engine, range(300), 16, lengths_of(Lengths.parse(mix, "--output"), 64 * 24, 64, 0))
    assert found.gain_in_steps >= least
    written, paged, contiguous = found.continuous.written, found.continuous.paged, found.continuous.contiguous
    assert 1 - written / paged < 0.08 and 1 - written / contiguous > 0.4


def test_what_is_counted(engine: Engine) -> None:
    """Two batches of 64 that end after 2 and 4 tokens, in contexts of 3 and more."""
    lengths = [2] * 64 + [2, 4] * 32
    found = compare(engine, range(300), 3, lengths)
    static, continuous = found.static, found.continuous
    assert static.requests == continuous.requests == 128 and static.tokens == continuous.tokens == sum(lengths)
    assert static.steps == 2 + 4
    # The first batch holds 3 and 4 positions; the second too, and then 5 and 6 in the rows that go on: those that
    # ended keep the 5 of which each wanted all.
    assert static.written == 64 * (3 + 4) + 64 * (3 + 4) + 32 * (5 + 6) + 32 * (5 + 5)
    assert static.contiguous == 64 * 2 * 5 + 64 * 4 * 7
    assert static.paged == 64 * 6 * 16 and static.whole_context == 64 * 6 * 512
    report = batching_report(found, "t", "c")
    assert {metric.name for metric in report.metrics} >= {"gain_in_steps", "kv_waste_paged"}
    assert report.sections[0].rows[2][0] == "gain" and report.sections[0].rows[3][4:] == ("1.60x", "", "")
    assert "<svg" in page(report)


def test_lengths_of_a_mix_are_in_every_batch() -> None:
    lengths = lengths_of(Lengths.parse("1/5/20/50", "--output"), 128, 64, 3)
    assert sorted(lengths[:64]) == sorted(lengths[64:]) == sorted([1, 5, 20, 50] * 16)
    assert lengths[:64] != lengths[64:]
    drawn = lengths_of(Lengths.parse("lognormal:20:1", "--output"), 50, 64, 3)
    assert len(drawn) == 50 and len(set(drawn)) > 10


def test_refusals(engine: Engine) -> None:
    with pytest.raises(UsageError, match="exceed the context"):
        compare(engine, range(300), 100, [500])
    with pytest.raises(UsageError, match="more text"):
        compare(engine, range(30), 100, [5])
