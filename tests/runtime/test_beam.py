"""Beam search against one by brute force over the logits of transformers, and its life in the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qserve.kernels import native
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.llm import LLM
from qserve.runtime.output import RequestOutput
from qserve.runtime.sampling import RequestError, SamplingParams

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
PROMPT = (9, 40, 77, 120, 33, 201, 14, 5, 300, 61, 8, 99, 150, 31, 7, 222, 18)


@dataclass
class Found:
    tokens: list[int]
    total: float
    reason: str


@pytest.fixture(scope="module")
def logprobs(tiny_model: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    @cache
    def after(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)

    return after


def brute_force(
    logprobs: Any, width: int, length: int, endings: frozenset[int], penalty: float = 1.0, early: bool = False
) -> list[Found]:
    """Every continuation of every beam, sorted."""
    beams, done = [Found([], 0.0, "")], []
    for step in range(1, length + 1):
        every = [
            Found([*beam.tokens, token], beam.total + value, "stop" if token in endings else "")
            for beam in beams
            for token, value in enumerate(logprobs((*PROMPT, *beam.tokens)).tolist())
        ]
        beams = []
        for found in sorted(every, key=lambda each: each.total, reverse=True):
            if len(beams) == width:
                break
            (done if found.reason else beams).append(found)
        done.sort(key=lambda each: each.total / len(each.tokens) ** penalty, reverse=True)
        if step == length:
            done += [replace(beam, reason="length") for beam in beams]
        elif len(done) >= width:
            reachable = max(beams[0].total / n**penalty for n in range(step + 1, length + 1))
            worst = done[width - 1].total / len(done[width - 1].tokens) ** penalty
            if early or worst >= reachable:
                break
    return sorted(done, key=lambda each: each.total / len(each.tokens) ** penalty, reverse=True)[:width]


def make_engine(model: Path, **config: Any) -> Engine:
    options = {"kv_cache_memory": 4 << 20, "kv_cache_dtype": "fp32", "threads": 2}
    return Engine(str(model), EngineConfig(**options | config))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def beams(width: int, length: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"n": width, "max_tokens": length, "use_beam_search": True, "ignore_eos": True} | more)


def finish(engine: Engine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
        engine.check()
    assert engine.stats().kv_blocks_used == 0
    return found


def search(engine: Engine, params: SamplingParams) -> list[RequestOutput]:
    engine.submit("mine", list(PROMPT), params)
    return finish(engine)["mine"]


def same(outputs: list[RequestOutput], expected: list[Found]) -> None:
    assert [output.index for output in outputs] == list(range(len(expected)))
    assert [output.token_ids for output in outputs] == [found.tokens for found in expected]
    assert [output.finish_reason for output in outputs] == [found.reason for found in expected]


@needs_native
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 6, 14])
def test_it_finds_what_brute_force_finds(engine: Engine, logprobs: Any, width: int, length: int) -> None:
    same(search(engine, beams(width, length)), brute_force(logprobs, width, length, frozenset()))


@needs_native
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("early", [False, True])
def test_endings(engine: Engine, logprobs: Any, penalty: float, early: bool) -> None:
    """Tokens that are likely somewhere end outputs, so that short and long ones compete."""
    free = brute_force(logprobs, 4, 9, frozenset())
    endings = frozenset({free[0].tokens[5], free[1].tokens[3], free[3].tokens[8]})
    for width in (1, 3):
        params = beams(
            width, 9, stop_token_ids=tuple(endings), length_penalty=penalty, early_stopping=early, logprobs=1
        )
        found, expected = search(engine, params), brute_force(logprobs, width, 9, endings, penalty, early)
        same(found, expected)
        for output, wanted in zip(found, expected):
            assert output.output_tokens == len(wanted.tokens)
            assert output.logprobs is not None
            assert sum(each.chosen.logprob for each in output.logprobs) == pytest.approx(wanted.total, abs=1e-3)
            assert output.stop_reason == (wanted.tokens[-1] if wanted.reason == "stop" else None)


@needs_native
def test_no_ending_before_min_tokens(engine: Engine, logprobs: Any) -> None:
    first = brute_force(logprobs, 1, 3, frozenset())[0].tokens[0]
    assert len(search(engine, beams(1, 6, stop_token_ids=(first,), early_stopping=True))[0].token_ids) == 1
    later = search(engine, beams(3, 6, stop_token_ids=(first,), min_tokens=3))
    assert all(first not in output.token_ids[:3] and len(output.token_ids) > 3 for output in later)


@needs_native
def test_biases_and_penalties_count(engine: Engine) -> None:
    free = search(engine, beams(2, 6))
    banned = {token: -100.0 for output in free for token in output.token_ids}
    other = search(engine, beams(2, 6, logit_bias=banned))
    assert not banned.keys() & {token for output in other for token in output.token_ids}
    unlike = search(engine, beams(3, 12, frequency_penalty=2.0, presence_penalty=2.0))
    assert unlike != search(engine, beams(3, 12))


def crowd(engine: Engine) -> None:
    for i in range(5):
        other = [(7 * i + j) % 300 + 3 for j in range(20 + 9 * i)]
        engine.submit(f"other{i}", other, SamplingParams(max_tokens=25, seed=i, ignore_eos=True))
    engine.submit("beams", list(range(5, 40)), beams(3, 15))


@needs_native
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"kv_cache_memory": 14 * 16 * 512, "max_model_len": 96},
        {"kv_cache_memory": 14 * 16 * 512, "max_model_len": 96, "enable_prefix_caching": False},
    ],
    ids=["roomy", "few at once", "preempted", "preempted, nothing cached"],
)
def test_a_neighbour_changes_nothing(engine: Engine, tiny_model: Path, config: dict[str, Any]) -> None:
    params = beams(4, 20, logprobs=1)
    alone = search(engine, params)
    tight = make_engine(tiny_model, **config)
    sampled = SamplingParams(max_tokens=25, seed=0, ignore_eos=True)
    engine.submit("other0", [j % 300 + 3 for j in range(20)], sampled)
    neighbour = [token for output in finish(engine)["other0"] for token in output.token_ids]
    crowd(tight)
    begun = [token for output in tight.step() if output.request_id == "other0" for token in output.token_ids]
    tight.submit("mine", list(PROMPT), params)
    found = finish(tight)
    assert [(o.token_ids, o.logprobs, o.text) for o in found["mine"]] == [
        (o.token_ids, o.logprobs, o.text) for o in alone
    ]
    assert begun + [token for output in found["other0"] for token in output.token_ids] == neighbour
    assert bool(tight.stats().num_preemptions) == ("kv_cache_memory" in config)


@needs_native
def test_abort_and_deadline_in_the_middle(tiny_model: Path) -> None:
    now = 0.0
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20, threads=2), clock=lambda: now)
    for steps in range(1, 9):
        engine.submit("mine", list(PROMPT), beams(4, 20))
        for _ in range(steps):
            engine.step()
            engine.check()
        engine.abort("mine")
        engine.check()
        assert not engine.has_work() and engine.stats().kv_blocks_used == 0
    engine.submit("late", list(PROMPT), beams(3, 20, timeout=5.0))
    for _ in range(4):
        assert engine.step() == []
    now = 6.0
    assert [(o.index, o.finish_reason) for o in engine.step()] == [(i, "timeout") for i in range(3)]
    engine.check()
    assert engine.stats().kv_blocks_used == 0


@needs_native
def test_a_nan_ends_the_search_alone(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    run = engine.runner.run

    def spoil(plan: Any, sink: Any) -> Any:
        output = run(plan, sink)
        if sum(name.startswith("mine") for name in output.request_ids) == 3:
            output.greedy[next(i for i, name in enumerate(output.request_ids) if name.startswith("mine"))] = -1
        return output

    engine.runner.run = spoil  # type: ignore[method-assign]
    engine.submit("other", [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    engine.submit("mine", list(PROMPT), beams(3, 20))
    found = finish(engine)
    assert [output.finish_reason for output in found["mine"]] == ["error"] * 3
    assert found["other"][-1].finish_reason == "length"


@needs_native
def test_what_does_not_fit_is_refused(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, kv_cache_memory=10 * 16 * 512, max_model_len=96, max_num_seqs=8)
    for params, param in (
        (beams(9, 4), "n"),
        (beams(8, 40), "n"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit("mine", list(PROMPT), params)
        assert caught.value.param == param
    engine.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 3),
        ("seed", 1),
        ("stop", "a"),
        ("prompt_logprobs", 1),
        ("length_penalty", 11),
        ("early_stopping", 1),
    ],
)
def test_what_a_beam_search_does_not_do(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(use_beam_search=True, **{field: value})
    assert caught.value.param == field


@needs_native
def test_offline(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20, threads=2))
    several, one = llm.generate(["the quick", "the lazy dog"], [beams(3, 9), beams(1, 9)])
    assert [len(answer.token_ids) for answer in several.outputs] == [9, 9, 9]
    assert len({answer.text for answer in several.outputs}) == 3
    greedy = llm.generate("the lazy dog", SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    assert one.outputs[0].token_ids == greedy[0].outputs[0].token_ids
    assert one.outputs[0].text == greedy[0].outputs[0].text
