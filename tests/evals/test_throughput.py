"""What a throughput measurement counts, on the tiny model. No rate is judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import open_model
from qserve.evals import throughput
from qserve.evals.throughput import Load, Speed, prompts_of, ratio_gates
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_packed: Path) -> Engine:
    return Engine(open_model(tiny_packed), EngineConfig(threads=1))


def test_prompts_differ_and_have_the_length_asked_for() -> None:
    prompts = prompts_of(range(1000), 7, 20)
    assert len(prompts) == 7 and {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt) for prompt in prompts}) == 7


@pytest.mark.parametrize(("concurrency", "output"), [(1, 5), (3, 5), (2, 1)])
def test_measure(engine: Engine, concurrency: int, output: int) -> None:
    load, tokens = Load(prompt=20, output=output), [i % 300 for i in range(7, 2000)]
    before = engine.stats()
    speed = throughput.measure(engine, tokens, concurrency, load, repeats=2)
    after = engine.stats()
    assert (speed.concurrency, speed.repeats) == (concurrency, 2)
    assert speed.ttft > 0 and speed.output > 0 and speed.prefill > 0
    assert (speed.decode == 0) == (output == 1)
    assert after.prefix_hits == before.prefix_hits, "no repeat is answered from the prefix cache"
    assert after.kv_blocks_used == 0 and not engine.has_work()
    engine.check()


def test_the_rates_of_one_run_follow_from_its_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a step: 24 prompt tokens fit one step, so the first ends the prefill."""
    real = engine.step
    now = [0.0]

    def step() -> object:
        now[0] += 1.0
        return real()

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    speed = throughput.measure(engine, list(range(300)), 3, Load(prompt=8, output=5), repeats=1)
    assert speed.ttft == 1.0 and speed.prefill == 24.0
    assert speed.decode == 3.0, "3 requests, 4 more tokens each, in 4 steps"
    assert speed.output == 3.0, "15 tokens in 5 steps"


def test_the_peer_in_transformers_is_the_same_model(tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    peer = throughput.TransformersPeer(open_model(tiny_model), torch.float32, 1)
    ids = torch.tensor([[5, 9, 200, 31]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(ids).logits
        assert torch.equal(peer.model(ids).logits, expected)
    speed = peer.measure(list(range(300)), Load(prompt=6, output=3), repeats=1)
    assert speed.concurrency == 1 and speed.output > 0


def test_ratio_gates() -> None:
    assert ratio_gates("1=3,16=8.5") == {1: 3.0, 16: 8.5}
    for text in ("x", "1", "1=", "=3", "1=3,", "1:3"):
        with pytest.raises(UsageError, match="--min-ratio"):
            ratio_gates(text)


def test_report_with_a_peer(engine: Engine) -> None:
    speeds = [Speed(1, 100.0, 30.0, 20.0, 0.05, 3), Speed(8, 400.0, 90.0, 60.0, 0.2, 3)]
    peer = (Speed(1, 50.0, 11.0, 10.0, 0.1, 3), "float32")
    report = throughput.report(engine, speeds, Load(), peer, {1: 3.0, 8: 6.0}, "qserve bench")
    assert report.data["ratios"] == {1: 2.0, 8: 6.0}
    assert [(gate.value, gate.limit, gate.passed) for gate in report.gates] == [(2.0, 3.0, False), (6.0, 6.0, True)]
    assert not report.passed
    rows = report.sections[0].rows
    assert [row[-1] for row in rows] == ["2.0x", "6.0x", "1"]
    assert all(len(row) == len(report.sections[0].header) for row in rows)
    alone = throughput.report(engine, speeds, Load(), None, {}, "qserve bench")
    assert alone.passed and "peer" not in alone.data and len(alone.sections[0].header) == 5
