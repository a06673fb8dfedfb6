"""What the engine's own code fails on ends one request: its neighbours get the same tokens, and its blocks are free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime.choice import Choice
from qserve.runtime.constraint import Constraint
from qserve.runtime.engine import Engine
from qserve.runtime.output import RequestOutput
from qserve.runtime.sampling import SamplingParams

from .test_overlap import engine_of

GOOD = SamplingParams(max_tokens=8, temperature=0.8, seed=5, ignore_eos=True)
BAD = replace(GOOD, seed=6)
PROMPT = [11, 12, 13, 14, 15]


def broken(*_: Any) -> Any:
    raise RuntimeError("a defect")


def late(times: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """As ``work`` for so many calls; then a defect."""
    left = iter(range(times))
    return lambda *arguments: work(*arguments) if next(left, None) is not None else broken()


def in_detokenizer(choice: Choice) -> None:
    choice._detokenizer.append = late(2, choice._detokenizer.append)  # type: ignore[method-assign]


def in_sampler(choice: Choice) -> None:
    assert choice.sequence.params.biases
    object.__setattr__(choice.sequence.params, "logit_bias", ((10**6, 1.0),))  # no token of the model


def in_mask(choice: Choice) -> None:
    assert choice.grammar is not None
    choice.grammar.allowed = late(2, choice.grammar.allowed)  # type: ignore[method-assign]


def in_matcher(choice: Choice) -> None:
    assert choice.grammar is not None
    choice.grammar.consume = late(2, choice.grammar.consume)  # type: ignore[method-assign]


def in_prompt_rows(choice: Choice) -> None:
    choice.take_rows = late(1, choice.take_rows)  # type: ignore[method-assign]


def in_pool(choice: Choice) -> None:
    assert choice._pool is not None
    choice._pool.vector = broken  # type: ignore[method-assign]


def in_search(choice: Choice) -> None:
    assert choice.search is not None
    choice.search.advance = late(2, choice.search.advance)  # type: ignore[method-assign]


def in_its_answers(choice: Choice) -> None:
    choice._new_detokenizer = broken  # type: ignore[method-assign]


CASES: dict[str, tuple[SamplingParams, Callable[[Choice], None]]] = {
    "detokenizer": (BAD, in_detokenizer),
    "sampler": (replace(BAD, logit_bias={3: 1.0}), in_sampler),
    "mask": (replace(BAD, constraint=Constraint("regex", "[a-z]{30}")), in_mask),
    "matcher": (replace(BAD, constraint=Constraint("regex", "[a-z]{30}")), in_matcher),
    "prompt rows": (replace(BAD, prompt_logprobs=1), in_prompt_rows),
    "pool": (SamplingParams(max_tokens=1, temperature=0.0, pooling="mean"), in_pool),
    "beam search": (SamplingParams(n=3, max_tokens=8, use_beam_search=True, temperature=0.0), in_search),
    "answers of a beam search": (
        SamplingParams(n=3, max_tokens=4, use_beam_search=True, temperature=0.0, ignore_eos=True),
        in_its_answers,
    ),
}


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    assert engine.stats().kv_blocks_used == 0
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Engine:
    """Chunks of eight tokens, so that a prompt's rows come in several steps."""
    return engine_of(tiny_model, request.param, max_num_batched_tokens=16, max_num_seqs=8)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_defect_ends_its_request_and_no_other(engine: Engine, case: str) -> None:
    params, sabotage = CASES[case]
    engine.submit("alone", PROMPT, GOOD)
    expected = tokens(run(engine)["alone"])
    engine.submit("bad", list(range(20, 60)), replace(params))
    engine.submit("good", PROMPT, GOOD)
    sabotage(engine._choices["bad#0"])
    outputs = run(engine)
    assert tokens(outputs["good"]) == expected and outputs["good"][-1].finish_reason == "length"
    ends = [output for output in outputs["bad"] if output.finish_reason is not None]
    assert sorted(output.index for output in ends) == list(range(params.n)), "each choice ends once"
    assert all(end.finish_reason == "error" and end.error_param is None for end in ends)
    assert all(end.error and "a defect" not in end.error and "log" in end.error for end in ends)
