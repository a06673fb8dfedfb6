"""Drafts: guesses of the tokens that come next change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.runtime.blocks import BlockManager
from qserve.runtime.config import EngineConfig
from qserve.runtime.constraint import Constraint
from qserve.runtime.drafter import Drafter, NGramDrafter
from qserve.runtime.engine import Engine
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request
from qserve.runtime.runner import DecoderRunner, StepOutput
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.scheduler import Scheduler
from qserve.runtime.speculative_config import SpeculativeConfig
from qserve.runtime.step_plan import RequestUpdate, StepPlan

SIZE = 4
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=5)
Answers = dict[tuple[str, int], tuple[Any, ...]]


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * 7) % 90 + 1 for index in range(length)]


KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "top": replace(DRAWN, top_k=7, top_p=0.9, min_p=0.01, temperature=1.3),
    "sigma": replace(DRAWN, top_n_sigma=1.5, temperature=1.6),
    "penalties": replace(DRAWN, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.7),
    "greedy penalties": replace(GREEDY, frequency_penalty=2.0, logit_bias={5: 2.0}),
    "logprobs": replace(DRAWN, logprobs=3, prompt_logprobs=3),
    "two": replace(DRAWN, n=2, seed=9),
    "stop string": replace(DRAWN, stop=("e", "a", "1"), min_tokens=2, max_tokens=40),
    "stop token": replace(GREEDY, stop_token_ids=tuple(range(0, 90, 5)), min_tokens=3, max_tokens=40),
    "ends": replace(DRAWN, ignore_eos=False, max_tokens=60),
    "regex": replace(DRAWN, constraint=Constraint("regex", "[a-e ]{3,9}")),
    "forced": replace(DRAWN, constraint=Constraint("regex", "(The quick brown fox|A lazy dog) [a-c]{2} jumps over it")),
    "beams": replace(GREEDY, n=2, use_beam_search=True, max_tokens=6),
}


class Guesses:
    """A drafter that knows the answers and tells them with mistakes, as chance has it."""

    def __init__(self, answers: Answers, seed: int = 0, right: float = 0.8) -> None:
        self._answers = {f"{name}#{index}": answer[0] for (name, index), answer in answers.items()}
        self._chance, self._right = random.Random(seed), right

    def expects(self, requests: Sequence[Request]) -> bool:
        return False

    def timed(self, rows: int, seconds: float) -> None:
        assert rows > 0 and seconds >= 0

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        drafts = {}
        for request in requests:
            known = self._answers.get(request.request_id, ())[len(request.output_token_ids) :]
            draft = list(known[: self._chance.randrange(7)]) + [3] * self._chance.randrange(2)  # beyond the end too
            drafts[request.request_id] = [t if self._chance.random() < self._right else (t + 1) % 90 for t in draft]
        return drafts


class Told(Guesses):
    """A drafter that tells the answer as it is."""

    def __init__(self, whole: list[int]) -> None:
        self._whole = whole

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return {each.request_id: self._whole[len(each.output_token_ids) :] for each in requests}


class Cheap(NGramDrafter):
    """Believes that further rows cost next to nothing."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config, 64)
        for rows in range(1, 65):
            for _ in range(4):
                super().timed(rows, 1 + rows / 1000)

    def timed(self, rows: int, seconds: float) -> None:
        pass


class AheadRunner:
    """Takes placeholders for the last step's tokens, as a device does that has them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._last: dict[str, int] = {}

    def run(self, plan: StepPlan, sink: Any) -> StepOutput:
        known = [
            each._replace(token_ids=tuple(self._last[each.request_id] if t < 0 else t for t in each.token_ids))
            for each in plan.sequences
        ]
        output: StepOutput = self._runner.run(replace(plan, sequences=tuple(known)), sink)
        greedy = output.greedy.clone()
        self._last = dict(zip(output.request_ids, greedy.tolist()))
        return replace(output, greedy=greedy, logits=output.logits.clone())


def answers_of(
    model: Path, drafter: Drafter | None = None, *, overlaps: bool = False, **config: Any
) -> tuple[Answers, Engine, int]:
    engine = Engine(str(model), EngineConfig(**{"kv_cache_memory": 1 << 20, "threads": 1, **config}))
    engine.drafter = drafter
    if overlaps:
        engine.runner, engine.overlaps = AheadRunner(engine.runner), True
    for index, (name, params) in enumerate(KINDS.items()):
        engine.submit(name, prompt(index % 4, 6 + 5 * index), params)
    found: dict[tuple[str, int], list[Any]] = {}
    steps = 0
    while engine.has_work():
        steps += 1
        for output in engine.step():
            found.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
    assert engine.stats().kv_blocks_used == 0
    return {
        key: (
            [token for output in outputs for token in output.token_ids],
            "".join(output.text for output in outputs),
            [logprobs for output in outputs for logprobs in output.logprobs or ()],
            [logprobs for output in outputs for logprobs in output.prompt_logprobs or ()],
            outputs[-1].finish_reason,
            outputs[-1].stop_reason,
            outputs[-1].output_tokens,
        )
        for key, outputs in found.items()
    }, engine, steps  # fmt: skip


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> tuple[Answers, int]:
    answers, engine, steps = answers_of(tiny_model)
    assert engine.journal.output_tokens == sum(
        len(answer[0]) for (name, _), answer in answers.items() if name != "beams"
    ) + 2 * KINDS["beams"].max_tokens - 1  # type: ignore[operator]
    return answers, steps


each_config = pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 16}, {"kv_cache_memory": 45_100, "max_num_seqs": 8},
     {"enable_prefix_caching": False}],
    ids=["roomy", "chunked", "preempting", "uncached"],
)  # fmt: skip


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapped"])
@each_config
def test_nobodys_answer_changes(
    tiny_model: Path, plain: tuple[Answers, int], overlaps: bool, config: dict[str, Any]
) -> None:
    answers, steps = plain
    found, engine, fewer = answers_of(tiny_model, Guesses(answers), overlaps=overlaps, **config)
    assert found == answers
    assert bool(engine.scheduler.num_preemptions) == ("kv_cache_memory" in config)
    if not config:
        assert fewer < steps


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_nobodys_answer_changes_whatever_is_drafted(
    tiny_model: Path, plain: tuple[Answers, int], data: st.DataObject
) -> None:
    seats = data.draw(st.integers(2, 16))
    config = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": data.draw(st.integers(seats, 80)),
        "kv_cache_memory": data.draw(st.integers(45_100, 200_000)),
        "enable_prefix_caching": data.draw(st.booleans()),
    }
    drafter = Guesses(plain[0], data.draw(st.integers(0, 1 << 30)), data.draw(st.floats(0, 1)))
    assert answers_of(tiny_model, drafter, overlaps=data.draw(st.booleans()), **config)[0] == plain[0]


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_nobodys_answer_changes_with_drafts_of_n_grams(
    tiny_model: Path, plain: tuple[Answers, int], overlaps: bool, method: str
) -> None:
    drafter = Cheap(SpeculativeConfig(method, prompt_lookup_min=1))
    found, engine, _ = answers_of(tiny_model, drafter, overlaps=overlaps)
    assert found == plain[0] and engine.stats().num_draft_tokens > engine.stats().num_drafts > 0
    if method == "suffix":  # it knows the answers now
        found, engine, steps = answers_of(tiny_model, drafter, overlaps=overlaps)
        assert found == plain[0] and steps < plain[1]
        assert engine.stats().num_draft_tokens > engine.stats().num_accepted_tokens > 100


def test_a_server_of_one_request_has_room_for_its_draft(tiny_model: Path) -> None:
    config = EngineConfig(kv_cache_memory=1 << 20, threads=1, max_num_seqs=1, speculative_config=SpeculativeConfig())
    engine = Engine(str(tiny_model), config)
    assert isinstance(engine.drafter, NGramDrafter) and engine.scheduler.config.logits_limit == 17
    engine.drafter = Cheap(SpeculativeConfig())
    list(engine.generate([[5, 6, 7, 8] * 9], [replace(GREEDY, logit_bias=dict.fromkeys((5, 6), 100.0))]))
    assert engine.stats().num_draft_tokens > 0


def test_steps_overlap_while_there_are_no_drafts(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1))
    engine.runner, engine.overlaps = AheadRunner(engine.runner), True
    engine.drafter = NGramDrafter(SpeculativeConfig(), 1)  # rows for no draft
    engine.submit("a", prompt(1, 5), GREEDY)
    engine.step()
    while engine.has_work():
        assert engine.scheduler.num_in_flight == 1, "the next step has begun"
        engine.step()


def test_what_a_grammar_forces_is_drafted(tiny_model: Path) -> None:
    steps, found = [], []
    for drafter in (None, Cheap(SpeculativeConfig())):
        engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1))
        engine.drafter = drafter
        for name in "ab":
            engine.submit(name, prompt(1, 5), replace(DRAWN, constraint=KINDS["forced"].constraint, max_tokens=60))
        outputs = []
        for step in range(1, 200):
            outputs += [(output.request_id, output.text, output.token_ids) for output in engine.step()]
            engine.check()
            if not engine.has_work():
                steps.append(step)
                break
        found.append(["".join(text for name, text, _ in outputs if name == wanted) for wanted in "ab"])
    assert found[0] == found[1] and found[0][0] == found[0][1] != ""
    assert engine.stats().num_accepted_tokens > 0 and steps[1] < steps[0]


def test_a_grammar_that_fails_on_a_draft_ends_its_request_alone(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1))
    engine.drafter = Cheap(SpeculativeConfig())
    for good in (True, False):
        engine.submit("bad", prompt(1, 5), KINDS["regex"])
        grammar = engine._choices["bad#0"].grammar
        assert grammar is not None
        grammar.draft = lambda guess: 1 // 0  # type: ignore[method-assign, assignment]
        if good:
            engine.submit("good", prompt(2, 5), GREEDY)
        ends = {}
        while engine.has_work():
            ends |= {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
            engine.check()
        assert ends == {"bad": "error"} | ({"good": "length"} if good else {})


def test_a_right_draft_takes_one_step(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1))
    engine.submit("a", prompt(1, 5), GREEDY)
    whole = [token for _ in range(24) for output in engine.step() for token in output.token_ids]
    assert not engine.has_work() and len(whole) == 24
    engine.drafter = Told(whole)
    engine.submit("b", prompt(1, 5), GREEDY)
    first, second = engine.step(), engine.step()
    assert [output.token_ids for output in (*first, *second)] == [whole[:1], whole[1:]]
    assert second[0].finish_reason == "length" and not engine.has_work()
    assert engine.journal.output_tokens == 48


def test_what_is_not_a_number_behind_a_draft_is_found_by_the_next_step(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1))
    engine.submit("a", prompt(1, 5), GREEDY)
    whole = [token for _ in range(24) for output in engine.step() for token in output.token_ids]
    runner = engine.runner
    assert isinstance(runner, DecoderRunner)

    class Broken:
        def run(self, plan: StepPlan, sink: Any) -> StepOutput:
            output = runner.run(plan, sink)
            ends = [position for s in plan.sequences
                    for position in range(s.start + len(s.token_ids) - s.num_sampled, s.start + len(s.token_ids))]
            broken = torch.tensor(ends) >= 10
            output.greedy[broken] = -1
            output.logits[broken] = torch.nan
            return output

    engine.runner = Broken()
    engine.drafter = Told(whole)
    engine.submit("b", prompt(1, 5), GREEDY)
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [token for output in outputs for token in output.token_ids] == whole[:6]  # those of positions 4 to 9
    assert outputs[-1].finish_reason == "error" and "NaN" in (outputs[-1].error or "")


def scheduler(blocks: int = 16, **limits: int) -> Scheduler:
    config = SchedulerConfig(**{"max_model_len": 64, "max_num_seqs": 2, "max_num_logits": 8, **limits})
    return Scheduler(config, BlockManager(blocks, SIZE))


def decoding(s: Scheduler, name: str = "a", length: int = 5, **params: Any) -> Request:
    request = Request(name, tuple(range(10, 10 + length)), SamplingParams(**{"max_tokens": 20, **params}))
    s.add(request)
    commit(s, schedule(s), **{name: (50,)})
    return request


def schedule(s: Scheduler, **drafts: tuple[int, ...]) -> StepPlan:
    plan = s.schedule(0.0, drafts)
    s.check()
    assert plan is not None
    return plan


def commit(s: Scheduler, plan: StepPlan, **runs: tuple[int, ...]) -> list[RequestUpdate]:
    updates = s.commit(plan, runs)
    s.check()
    return updates


def test_a_plan_asks_for_the_rows_of_a_draft_and_takes_back_what_was_wrong() -> None:
    s = scheduler()
    request = decoding(s)
    plan = schedule(s, a=(51, 52, 53, 54))
    (share,) = plan.sequences
    assert (share.token_ids, share.start, share.num_sampled, share.is_prefill) == ((50, 51, 52, 53, 54), 5, 5, False)
    assert share.draft == (51, 52, 53, 54) and len(share.block_tables[0]) == 3 and plan.rows == ("a",) * 5
    assert s.schedule(0.0) is None, "how far the draft is right is not known yet"
    assert commit(s, plan, a=(51, 52, 60)) == [RequestUpdate("a", (51, 52, 60))]
    assert request.output_token_ids == [50, 51, 52, 60]
    assert request.num_computed == request.num_committed == 8 and len(s.blocks.table("a")) == 3
    assert s.blocks.num_cached == 2, "blocks of what came are found, the accepted guesses among it"
    assert schedule(s).sequences[0].token_ids == (60,)


def test_the_blocks_of_wrong_guesses_are_free_again() -> None:
    s = scheduler()
    request = decoding(s, length=4)
    assert len(schedule(s, a=(51, 52, 53, 54, 55)).sequences[0].block_tables[0]) == 3
    s.commit(s._in_flight[0][0], {"a": (9,)})
    s.check()
    assert request.num_computed == 5 and len(s.blocks.table("a")) == 2 and s.blocks.num_cached == 1


@pytest.mark.parametrize(
    "params", [{"max_tokens": 4}, {"stop_token_ids": (53,)}, {"stop_token_ids": (53, 51), "min_tokens": 3}], ids=str
)
def test_what_follows_an_end_is_dropped(params: dict[str, Any]) -> None:
    s = scheduler()
    request = decoding(s, **params)
    draft = (51, 52, 53, 54)
    plan = schedule(s, a=draft)
    sampled = plan.sequences[0].num_sampled
    (update,) = commit(s, plan, a=(*draft, 55)[:sampled])
    assert update.token_ids == (51, 52, 53) and update.finish_reason in ("stop", "length")
    assert request.output_token_ids == [50, 51, 52, 53] and not s.has_work() and s.blocks.num_used == 0


def test_nobody_waits_or_is_preempted_for_a_draft() -> None:
    for blocks, lengths in ((4, [0, 0]), (6, [4, 0])):  # a block is kept for each that runs, and a step has six tokens
        s = scheduler(blocks=blocks, max_num_batched_tokens=6)
        s.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=12 if blocks == 6 else 6)))
        s.add(Request("b", (1, 2, 3), SamplingParams(max_tokens=6)))
        commit(s, schedule(s), a=(50,), b=(50,))
        plan = schedule(s, a=(1, 2, 3, 4, 5, 6, 7), b=(1, 2, 3))
        assert [len(each.draft) for each in plan.sequences] == lengths and not plan.preempted


def test_a_draft_is_cut_to_the_rows_and_to_the_answer() -> None:
    s = scheduler(max_num_logits=4)
    decoding(s)
    assert len(schedule(s, a=(1,) * 30).sequences[0].draft) == 3
    s = scheduler(max_num_logits=32)
    decoding(s, max_tokens=4)
    assert len(schedule(s, a=(1,) * 30).sequences[0].draft) == 2


def test_only_what_follows_the_draft_is_a_run() -> None:
    s = scheduler()
    decoding(s)
    plan = schedule(s, a=(51, 52))
    for run in ((), (51, 60, 61), (60, 61), (51, 52, 53, 54)):
        with pytest.raises(ValueError, match=r"no result|does not follow"):
            s.commit(plan, {"a": run})
        s.check()
    assert commit(s, plan, a=(51, 52, 53)) == [RequestUpdate("a", (51, 52, 53))]


def test_who_is_preempted_or_ends_beside_its_draft_keeps_what_came() -> None:
    s = scheduler()
    first, second = (Request(name, (1, 2, 3), SamplingParams(max_tokens=20)) for name in "ab")
    s.add(first)
    s.add(second)
    commit(s, schedule(s), a=(50,), b=(50,))
    plan = schedule(s, a=(51,), b=(51, 52))
    s._preempt(second)
    s.check()
    s.finish("a", "abort")
    s.check()
    assert commit(s, plan, b=(51, 60)) == [RequestUpdate("b", (51, 60))]
    assert second.output_token_ids == [50, 51, 60] and first.output_token_ids == [50]
    again = schedule(s).sequences[0]
    assert again.token_ids[-1] == 60 and again.num_sampled == 1
