"""What continuous batching gains, counted in steps of the real scheduler: nothing here depends on a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.checkpoint.source import open_model
from qserve.evals.bench.batching import compare, lengths_of
from qserve.evals.simulator.traffic import Lengths
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.runner import StepOutput


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
    lengths = lengths_of(Lengths.parse(mix, "--output"), 64 * 28, 500, 0)
    found = compare(engine, range(300), 2, lengths)
    print(mix, found.static.steps, found.continuous.steps, found.gain_in_steps, found.bound)
    assert found.bound == pytest.approx(bound)
    assert least <= found.gain_in_steps <= bound
