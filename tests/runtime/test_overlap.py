"""The next step begins while the last one's tokens become text: the order, and that no request's tokens change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.kernels.row_sampling import RowSampling
from qserve.runtime.config import EngineConfig
from qserve.runtime.device_sampler import sample_rows
from qserve.runtime.engine import Engine
from qserve.runtime.output import RequestOutput
from qserve.runtime.runner import DecoderRunner, StepOutput
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.step_plan import StepPlan

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class Ahead:
    """Takes placeholders for the last step's greedy tokens, as a device does that has them, and notes what is asked."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.asked: list[tuple[str, int]] = []
        self.last: dict[str, int] = {}

    def run(self, plan: StepPlan, sink: Any) -> StepOutput:
        self.asked.append(("begin", plan.step))
        known = [
            each._replace(token_ids=tuple(self.last[each.request_id] if t < 0 else t for t in each.token_ids))
            for each in plan.sequences
        ]
        output = self.runner.run(replace(plan, sequences=tuple(known)), sink)
        greedy = output.greedy.clone()
        self.last = dict(zip(output.request_ids, greedy.tolist()))
        wait = lambda: self.asked.append(("wait", plan.step))  # noqa: E731
        output = replace(output, greedy=greedy, logits=output.logits.clone(), wait=wait)
        return replace(output, draw=partial(self.draw, output))

    def draw(self, output: StepOutput, draws: Any) -> StepOutput:
        output.greedy[[row for row, _ in draws]] = sample_rows(output.logits, draws).int()
        self.last = dict(zip(output.request_ids, output.greedy.tolist()))
        return output


def engine_of(model: Path, overlaps: bool, **config: Any) -> tuple[Engine, Ahead]:
    engine = Engine(str(model), EngineConfig(**{"kv_cache_memory": 1 << 20, "threads": 2, **config}))
    engine.runner = runner = Ahead(engine.runner)
    engine.overlaps = overlaps
    return engine, runner


def finish(engine: Engine, between: Callable[[int], None] = lambda step: None) -> dict[tuple[str, int], Any]:
    """Everything that was output, by request and choice."""
    found: dict[tuple[str, int], list[RequestOutput]] = {}
    for step in range(1000):
        if not engine.has_work():
            break
        for output in engine.step():
            found.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
        between(step)
    assert not engine.has_work() and engine.stats().kv_blocks_used == 0
    return {
        key: (
            [token for output in outputs for token in output.token_ids],
            "".join(output.text for output in outputs),
            [output.logprobs for output in outputs],
            outputs[-1].finish_reason,
            outputs[-1].stop_reason,
        )
        for key, outputs in found.items()
    }


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * 7) % 90 + 1 for index in range(length)]


def test_a_step_begins_before_the_tokens_of_the_last_are_known(tiny_model: Path) -> None:
    engine, runner = engine_of(tiny_model, True)
    engine.submit("a", prompt(1, 5), GREEDY)
    finish(engine)
    steps = range(GREEDY.max_tokens or 0)
    begins, waits = [("begin", step) for step in steps], [("wait", step) for step in steps]
    overlapped = [each for pair in zip(begins[1:], waits) for each in pair]
    assert runner.asked == [begins[0], *overlapped, waits[-1]]  # and one wait for each


@pytest.mark.parametrize("others", [
    {"logit_bias": {5: 1.0}}, {"presence_penalty": 0.5}, {"allowed_token_ids": (5, 6)},
    {"bad_words": ("fox",)},
], ids=str)  # fmt: skip
def test_more_of_the_logits_than_a_token_is_waited_for(tiny_model: Path, others: dict[str, Any]) -> None:
    engine, runner = engine_of(tiny_model, True)
    engine.submit("a", prompt(1, 5), GREEDY)
    engine.submit("b", prompt(2, 5), replace(GREEDY, temperature=1.0, seed=3, **others))
    finish(engine)
    steps = range(GREEDY.max_tokens or 0)
    assert runner.asked == [(what, step) for step in steps for what in ("begin", "wait")]


def test_tokens_that_are_drawn_are_not_waited_for_and_the_same(tiny_model: Path) -> None:
    found = []
    for overlaps in (True, False):
        engine, runner = engine_of(tiny_model, overlaps)
        engine.submit("greedy", prompt(1, 5), replace(GREEDY, max_tokens=20))
        engine.submit("told", prompt(2, 5), replace(GREEDY, max_tokens=20, logprobs=2))
        drawn = ({}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.02}, {"min_tokens": 4}, {"logprobs": 0}, {"logprobs": 3})
        for index, options in enumerate(drawn):
            drawing = replace(GREEDY, max_tokens=12 + index, temperature=1.0 + index / 2, seed=index, **options)
            engine.submit(f"drawn {index}", prompt(index, 5 + index), drawing)
        found.append(finish(engine))
        ahead = [a for a, b in zip(runner.asked, runner.asked[1:]) if a[0] == b[0] == "begin"]
        assert bool(ahead) == overlaps
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens, *_ in found[0].values()}) == 9


def test_a_runner_leaves_what_was_drawn_where_the_next_step_looks(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1))
    runner = engine.runner
    assert isinstance(runner, DecoderRunner)
    for name in "abcd":
        engine.submit(name, prompt(ord(name), 4), GREEDY)
    engine.step()
    logits, greedy = runner.decoder.logits, runner.decoder.greedy
    logits[2, 3], greedy[2] = torch.nan, -1
    before = greedy[:4].tolist()
    likeliest = RowSampling(0.0, top_k=1)
    last = RowSampling(1.0 - 2.0**-53, top_k=2)
    got = runner._sampled(tuple("abcd"), [(3, last), (0, likeliest), (2, likeliest)])
    assert got.greedy.tolist() == greedy[:4].tolist() == [*before[:2], -1, int(logits[3].topk(2).indices[1])]
    assert runner._sampled(tuple("abcd"), []).greedy.tolist() == got.greedy.tolist(), "without draws nothing changes"


def load(engine: Engine) -> None:
    """Requests of every kind, greedy ones first, which overlap as long as they are alone."""
    for index in range(6):
        engine.submit(f"g{index}", prompt(index % 4, 9 + 11 * index), replace(GREEDY, max_tokens=5 + 7 * index))
    engine.submit("stops", prompt(7, 20), replace(GREEDY, max_tokens=30, stop=("e", "a")))
    engine.submit("ends", prompt(8, 20), replace(GREEDY, max_tokens=30, stop_token_ids=tuple(range(0, 90, 3))))
    engine.submit("two", prompt(9, 40), replace(GREEDY, n=2, max_tokens=12))


def later(engine: Engine, step: int) -> None:
    if step == 6:
        engine.submit("seeded", prompt(3, 30), replace(GREEDY, temperature=0.8, seed=11, top_p=0.9))
        engine.submit("least", prompt(5, 12), replace(GREEDY, min_tokens=3, logprobs=2))
    if step == 9:
        engine.submit("beams", prompt(6, 12), replace(GREEDY, n=2, use_beam_search=True))


@pytest.mark.parametrize("cache", [1 << 20, 40_000], ids=["roomy", "preempting"])
def test_nobodys_tokens_change(tiny_model: Path, cache: int) -> None:
    found, preempted = [], []
    for overlaps in (False, True):
        engine, runner = engine_of(tiny_model, overlaps, kv_cache_memory=cache, max_num_batched_tokens=64)
        load(engine)
        found.append(finish(engine, lambda step, engine=engine: later(engine, step)))  # type: ignore[misc]
        preempted.append(engine.scheduler.num_preemptions)
        ahead = [a for a, b in zip(runner.asked, runner.asked[1:]) if a[0] == b[0] == "begin"]
        assert bool(ahead) == overlaps
    assert found[0] == found[1] and len(found[0]) == 14
    assert (min(preempted) > 0) == (cache < 1 << 20)


def test_an_aborted_name_is_free_at_once(tiny_model: Path) -> None:
    engine, _ = engine_of(tiny_model, True)
    engine.submit("a", prompt(1, 5), GREEDY)
    engine.step()
    assert engine.scheduler.num_in_flight == 1
    engine.abort("a")
    engine.submit("a", prompt(2, 5), GREEDY)
    again = finish(engine)
    alone, _ = engine_of(tiny_model, False)
    alone.submit("a", prompt(2, 5), GREEDY)
    assert finish(alone) == again


def test_a_failure_of_the_step_ahead_leaves_an_engine_as_good_as_new(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = engine_of(tiny_model, True)
    engine.submit("a", prompt(1, 5), GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", lambda plan, sink: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.has_work() and engine.scheduler.num_in_flight == 0
    engine.submit("b", prompt(1, 5), GREEDY)
    assert len(finish(engine)["b", 0][0]) == GREEDY.max_tokens
